import json

import pytest
from pydantic import TypeAdapter, ValidationError

from knnper.data.catalogue import DATA_SETS
from knnper.settings import Settings

REQUIRED = {
    "image_folder": {"root": "/data"},
    "domain_folder": {"root": "/data"},
    "table": {"train": "rows.csv", "label": "kind"},
    "npz": {"path": "own.npz"},
    "hugging_face": {"path": "own", "label": "kind"},
    "plays": {"path": "plays.json"},
    "leaf_femnist": {"root": "/data"},
    "leaf_shakespeare": {"root": "/data"},
}


@pytest.mark.parametrize("name", DATA_SETS)
def test_settings_refuse_unknown_keys(name: str) -> None:
    settings_type = DATA_SETS[name].settings_type
    assert issubclass(settings_type, Settings)
    given = REQUIRED.get(name, {})
    adapter = TypeAdapter(settings_type)
    assert isinstance(adapter.validate_json(json.dumps(given)), settings_type)
    with pytest.raises(ValidationError, match="colour"):
        adapter.validate_json(json.dumps({**given, "colour": 1}))
