import json

import pytest
from pydantic import TypeAdapter, ValidationError

from knnper.config.sections import Settings
from knnper.data.catalogue import DATA_SETS
from knnper.data.digits import DigitsSettings

REQUIRED = {
    "image_folder": {"root": "/data"},
    "table": {"train": "rows.csv", "label": "kind"},
}


def test_names() -> None:
    expected = {
        "digits",
        "image_folder",
        "cifar10",
        "cifar100",
        "fashion_mnist",
        "emnist",
        "table",
        "synthetic_mixture",
    }
    assert set(DATA_SETS) == expected


def test_a_data_set_is_loaded_by_name() -> None:
    assert DATA_SETS["digits"].load(DigitsSettings()).name == "digits"


@pytest.mark.parametrize("name", DATA_SETS)
def test_settings_refuse_unknown_keys(name: str) -> None:
    settings_type = DATA_SETS[name].settings_type
    assert issubclass(settings_type, Settings)
    given = REQUIRED.get(name, {})
    adapter = TypeAdapter(settings_type)
    assert isinstance(adapter.validate_json(json.dumps(given)), settings_type)
    with pytest.raises(ValidationError, match="colour"):
        adapter.validate_json(json.dumps({**given, "colour": 1}))
