"""A client's memory of text keeps the ids of characters."""

from knnper.client.install import store_spec
from knnper.data.text import CHARACTER_NAMES
from knnper.datastore.examples import InputLayout
from tests.client.service.small_service import TEXT, tiny_model


def test_ids_are_kept_as_bytes() -> None:
    spec = store_spec(tiny_model(spec=TEXT))
    assert spec.input == InputLayout((1, 1, 6), "uint8")
    assert spec.input_bytes == 6
    assert spec.class_names == CHARACTER_NAMES
