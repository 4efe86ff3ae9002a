"""Starting from a local file of weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from knnper.data.examples import InputSpec
from knnper.errors import ConfigError
from knnper.flat_model import FlatModel
from knnper.models import MODELS, build_model
from knnper.networks import TinyCnnSettings
from knnper.process import import_torchvision
from knnper.seeding import RandomKey
from knnper.settings import Choice

HEAD = ("classifier.weight", "classifier.bias")


def digits(num_classes: int) -> InputSpec:
    return InputSpec((8, 8, 1), num_classes, mean=(0.0,), std=(1.0,))


def tiny(seed: int, weights: Path | None = None, num_classes: int = 10) -> FlatModel:
    settings = TinyCnnSettings(weights=str(weights) if weights else None)
    return build_model(
        Choice("tiny_cnn", settings), digits(num_classes), RandomKey(seed)
    )


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    model = tiny(seed=1)
    return model.named(model.read())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "weights.safetensors"


def test_a_file_replaces_the_random_weights(
    tensors: dict[str, Tensor], file: Path
) -> None:
    save_file(tensors, file)
    assert torch.equal(tiny(seed=2, weights=file).read(), tiny(seed=1).read())


@pytest.mark.parametrize(("num_classes", "has_head"), [(7, True), (10, False)])
def test_a_head_for_other_classes_or_none_leaves_a_fresh_one(
    tensors: dict[str, Tensor], file: Path, num_classes: int, has_head: bool
) -> None:
    body = {name: tensors[name] for name in tensors.keys() - set(HEAD)}
    save_file(tensors if has_head else body, file)
    model = tiny(seed=2, weights=file, num_classes=num_classes)
    fresh = tiny(seed=2, num_classes=num_classes)
    expected = fresh.named(fresh.read()) | body
    found = model.named(model.read())
    assert tensors.keys() == expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in tensors)


@pytest.mark.parametrize(
    ("name", "head", "num_classes", "num_tensors"),
    [
        ("mobilenet_v2", "classifier.1.weight", 1000, 52 * 5),
        ("resnet18", "fc.weight", 1000, 20 * 5),
        ("resnet18", "fc.weight", 5, 20 * 5),
    ],
)
def test_torchvisions_own_names_are_taken(
    file: Path, name: str, head: str, num_classes: int, num_tensors: int
) -> None:
    with RandomKey(4).torch():
        models = import_torchvision().models
        published = getattr(models, name)(num_classes=num_classes)
    state = published.state_dict()
    save_file(state, file)
    spec = InputSpec((32, 32, 3), 5, mean=(0.0,) * 3, std=(1.0,) * 3)
    settings = MODELS[name].settings_type(weights=str(file))
    model = build_model(Choice(name, settings), spec, RandomKey(5))
    found = model.named(model.read())

    body = {one for one in found if not one.startswith("classifier.")}
    assert len(body) == num_tensors
    assert all(torch.equal(found[one], state[one]) for one in body)
    own = found[head.replace("fc.", "classifier.")]
    assert torch.equal(own, state[head]) is (num_classes == 5)


def test_all_misfits_outside_the_head_are_reported(
    tensors: dict[str, Tensor], file: Path
) -> None:
    del tensors["features.0.bias"]
    tensors["features.2.bias"] = torch.zeros(3)
    tensors["features.6.bias"][1] = torch.nan
    tensors["stem.weight"] = torch.zeros(1)
    save_file(tensors, file)
    with pytest.raises(ConfigError) as caught:
        tiny(seed=2, weights=file)
    found = {problem.place: problem.message for problem in caught.value.problems}
    assert found == {
        "features.0.bias": "the file has no such tensor",
        "features.2.bias": "expected shape (32,), found (3,)",
        "features.6.bias": "expected finite numbers, found NaN or infinity",
        "stem.weight": "the model has no such tensor; is it for another model?",
    }
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("infinite", r"classifier\.bias: expected finite"),
        (None, r"expected a readable file of tensors"),
        (b"not a tensor in sight", "correct the path, or remove it"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tensors: dict[str, Tensor], file: Path, content: str | bytes | None, message: str
) -> None:
    if content == "infinite":
        tensors["classifier.bias"][0] = torch.inf
        save_file(tensors, file)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        tiny(seed=2, weights=file)
