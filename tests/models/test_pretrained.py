"""Starting from a local file of weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from knnper.data.examples import InputSpec
from knnper.errors import ConfigError
from knnper.experiment import Choice
from knnper.models import (
    FlatModel,
    MobileNetV2Settings,
    ResNet18Settings,
    TinyCnnSettings,
    build_model,
)
from knnper.process import import_torchvision
from knnper.seeding import RandomKey

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
    kept = tensors if has_head else {n: tensors[n] for n in tensors.keys() - set(HEAD)}
    save_file(kept, file)
    model = tiny(seed=2, weights=file, num_classes=num_classes)
    found, fresh = model.named(model.read()), tiny(seed=2, num_classes=num_classes)
    for name in tensors.keys() - set(HEAD):
        assert torch.equal(found[name], tensors[name])
    for name in HEAD:
        assert torch.equal(found[name], fresh.named(fresh.read())[name])


def test_torchvisions_own_names_are_taken(file: Path) -> None:
    with RandomKey(4).torch():
        published = import_torchvision().models.mobilenet_v2(num_classes=1000)
    state = published.state_dict()
    save_file(state, file)
    spec = InputSpec((32, 32, 3), 10, mean=(0.0,) * 3, std=(1.0,) * 3)
    settings = MobileNetV2Settings(weights=str(file))
    model = build_model(Choice("mobilenet_v2", settings), spec, RandomKey(5))
    found = model.named(model.read())

    shared = found.keys() - {"classifier.1.weight", "classifier.1.bias"}
    assert len(shared) == 52 * 5
    assert all(torch.equal(found[name], state[name]) for name in shared)
    assert found["classifier.1.weight"].shape == (10, 1280)


@pytest.mark.parametrize("num_classes", [5, 1000])
def test_a_head_may_be_called_as_torchvision_calls_it(
    file: Path, num_classes: int
) -> None:
    with RandomKey(4).torch():
        published = import_torchvision().models.resnet18(num_classes=num_classes)
    state = published.state_dict()
    save_file(state, file)
    spec = InputSpec((32, 32, 3), 5, mean=(0.0,) * 3, std=(1.0,) * 3)
    settings = ResNet18Settings(weights=str(file))
    model = build_model(Choice("resnet18", settings), spec, RandomKey(5))
    found = model.named(model.read())

    own = {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(found[name], state[name]) for name in found.keys() - own)
    fits = torch.equal(found["classifier.weight"], state["fc.weight"])
    assert fits is (num_classes == 5)


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
        (None, r"expected a readable \.safetensors file"),
        (b"not a tensor in sight", "correct the path, or leave it out"),
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
