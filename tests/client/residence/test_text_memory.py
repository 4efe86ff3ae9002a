"""A client's memory of text keeps the ids of characters."""

from client.residence.building import store_spec
from datastore.examples import InputLayout
from knnper.data.text.alphabet import CHARACTER_NAMES
from tests.client.service.small_service import TEXT, tiny_model


def test_ids_are_kept_as_bytes() -> None:
    spec = store_spec(tiny_model(spec=TEXT))
    assert spec.input == InputLayout((1, 1, 6), "uint8")
    assert spec.input_bytes == 6
    assert spec.class_names == CHARACTER_NAMES
