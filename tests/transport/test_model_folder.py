import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from knnper.data.task_file import read_task
from knnper.datastore.memory import default_memory
from knnper.errors import DataError
from knnper.files import ForeignFileError
from knnper.strategies.core.exported_model import (
    CARD,
    DESCRIPTION,
    ModelError,
    fingerprint_of,
    is_model_folder,
    load_model,
    save_model,
)
from knnper.weight_files import WEIGHTS
from tests.client.state.small_site import TASK, queries, small_model
from tests.foreign_files import PLANTS, make_victim, plant


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", small_model(num_neighbors=5))
    return tmp_path / "model"


def test_what_is_loaded_is_what_was_saved(folder: Path) -> None:
    model, loaded = small_model(num_neighbors=5), load_model(folder)
    assert is_model_folder(folder)
    assert sorted(path.name for path in folder.iterdir()) == [DESCRIPTION, WEIGHTS]
    assert loaded.card == model.card
    assert loaded.card.memory.num_neighbors == 5
    assert loaded.fingerprint == model.fingerprint
    assert loaded.card.learned == TASK
    assert (loaded.embedding_dim, loaded.card.num_rounds) == (8, 3)
    found, expected = loaded.embed(queries()), model.embed(queries())
    assert torch.equal(found, expected)
    assert torch.equal(loaded.head(found), model.head(expected))


def test_the_fingerprint_is_of_all_that_an_embedding_depends_on() -> None:
    model = small_model()
    card, spec = model.card, model.spec
    found = {
        fingerprint_of(changed, model.weights)
        for changed in (
            card,
            replace(card, precision="bfloat16"),
            replace(card, spec=replace(spec, mean=(0.4,))),
            replace(card, spec=replace(spec, std=(0.4,))),
            replace(card, spec=replace(spec, dtype="float32")),
            replace(card, model={**card.model, "embedding_dim": 9}),
        )
    }
    same = replace(card, name="other", seed=9, class_names=("a", "b", "c", "d"))
    assert len(found) == 6
    assert fingerprint_of(same, model.weights) == model.fingerprint
    assert fingerprint_of(card, model.weights + 1e-7) != model.fingerprint


def test_a_method_without_a_memory_gets_the_default_one() -> None:
    assert small_model(method="fedavg").card.memory == default_memory()
    assert default_memory().tuning.evidence_of(20, 1) == "leave_one_out"


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    before = (folder / WEIGHTS).stat().st_mtime_ns
    save_model(folder, small_model(num_neighbors=5))
    assert (folder / WEIGHTS).stat().st_mtime_ns == before
    with pytest.raises(ModelError, match="give another folder"):
        save_model(folder, small_model(seed=1))
    (tmp_path / "other").mkdir()
    with pytest.raises(ModelError, match="exists and holds no model"):
        save_model(tmp_path / "other", small_model())


def seal(folder: Path) -> None:
    """Write the fingerprint of what the folder holds, as its maker would have."""
    document = json.loads((folder / DESCRIPTION).read_text())
    card = CARD.validate_json(json.dumps(document["card"]))
    weights = load_file(folder / WEIGHTS)["weights"]
    document["fingerprint"] = fingerprint_of(card, weights)
    (folder / DESCRIPTION).write_text(json.dumps(document))


def weights_with(change: float) -> dict[str, torch.Tensor]:
    weights = small_model().weights.clone()
    weights[3] += change
    return {"weights": weights}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (weights_with(1e-6), r"expected the model \w{12}, found \w{12}"),
        ({"weights": torch.zeros(7)}, r"expected the model \w{12}, found \w{12}"),
        (b"", r"cannot be read .*; export the model again"),
        (b"no tensors at all", r"cannot be read .*; export the model again"),
    ],
)
def test_other_weights_are_refused(folder: Path, weights: Any, message: str) -> None:
    if isinstance(weights, bytes):
        (folder / WEIGHTS).write_bytes(weights)
    else:
        save_file(weights, folder / WEIGHTS)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    save_file({"weights": torch.zeros(7)}, folder / WEIGHTS)
    seal(folder)
    with pytest.raises(ModelError, match=r"expected weights of shape .* found \(7,\)"):
        load_model(folder)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_description_is_refused(folder: Path, content: str) -> None:
    (folder / DESCRIPTION).write_text(content)
    with pytest.raises(ModelError, match="export the model again"):
        load_model(folder)
    assert not is_model_folder(folder.parent)
    with pytest.raises(ModelError, match=r"holds no model: model.json is missing"):
        load_model(folder.parent)


def with_card(folder: Path, **changes: Any) -> None:
    """Change what the folder says of its model, and seal it as its maker would."""
    document = json.loads((folder / DESCRIPTION).read_text())
    for section, values in changes.items():
        document["card"][section].update(values)
    (folder / DESCRIPTION).write_text(json.dumps(document))
    seal(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"spec": {"image_shape": [4096, 4096, 1]}},
            r"expected weights of shape \(\d+",
        ),
        ({"spec": {"num_classes": 10**9}}, r"expected weights of shape \(\d+"),
        ({"model": {"embedding_dim": 10**9}}, r"expected weights of shape \(\d+"),
        (
            {"model": {"embedding_dim": 10**9, "trained": "head"}},
            "the model has .* numbers and its file",
        ),
    ],
)
def test_a_network_is_as_large_as_its_file(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with_card(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


@pytest.mark.parametrize("shape", [[10**6, 10**6, 1], [0, 8, 1], [-8, -8, 1]])
def test_a_shape_for_which_memory_must_not_be_taken_is_refused(
    folder: Path, shape: list[int]
) -> None:
    document = json.loads((folder / DESCRIPTION).read_text())
    document["card"]["spec"]["image_shape"] = shape
    (folder / DESCRIPTION).write_text(json.dumps(document))
    with pytest.raises(ModelError, match="found inputs of shape"):
        load_model(folder)
    with pytest.raises(DataError, match="found inputs of shape"):
        read_task(folder)


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("entry", [DESCRIPTION, WEIGHTS, "more"])
@pytest.mark.usefixtures("deadline")
def test_a_folder_with_something_foreign_is_refused(
    folder: Path, entry: str, kind: str, tmp_path: Path
) -> None:
    plant(kind, folder / entry, make_victim(tmp_path / "victim"))
    with pytest.raises(ForeignFileError, match=f"{entry} is a "):
        load_model(folder)
    if entry != DESCRIPTION:
        with pytest.raises(ForeignFileError, match=f"{entry} is a "):
            read_task(folder)


HUGE, DEEP = {"name": "huge_net"}, {"name": "tiny_cnn", "depth": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "a model of format 2, expected 1"),
        ({"model": HUGE}, "unknown 'huge_net', expected"),
        ({"model": DEEP}, r"model\.depth: unknown setting"),
        ({"card": {"name": "small"}}, "another version of the software"),
    ],
)
def test_another_version_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    path = folder / DESCRIPTION
    document = json.loads(path.read_text())
    if "model" in changes:
        changes = {"card": {**document["card"], **changes}}
    path.write_text(json.dumps({**document, **changes}))
    if message.startswith(("unknown", "model")):
        seal(folder)
    with pytest.raises(ModelError, match=message):
        load_model(folder)
