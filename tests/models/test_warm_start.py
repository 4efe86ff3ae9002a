"""Training that begins with a model which this project wrote."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from knnper.data.examples import Examples, InputSpec
from knnper.data.site_task import SiteTask
from knnper.errors import ConfigError
from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment
from knnper.exported_weights import LAYOUT
from knnper.flat_model import FlatModel
from knnper.process import import_torchvision
from knnper.seeding import RandomKey
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.core.assembly import assemble
from knnper.strategies.core.exported_model import (
    GlobalModel,
    global_model,
    load_model,
    save_model,
)
from knnper.strategies.core.training import local_sgd
from knnper.weight_files import WEIGHTS

GREY = SiteTask(InputSpec((8, 8, 1), 4, (0.5,), (0.3,)), ("ant", "bee", "cat", "dog"))
COLOUR = SiteTask(InputSpec((32, 32, 3), 4, (0.5,) * 3, (0.3,) * 3), GREY.class_names)
OWN_NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes: int, hidden: int = 6):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.hidden, self.out = nn.Linear(144, hidden), nn.Linear(hidden, num_classes)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu()
        return self.out(self.hidden(x.view(-1, 144)).relu())
"""


def experiment_of(model: dict[str, Any], seed: int, folder: Path) -> Experiment:
    document = {
        "name": "start",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 2},
        "model": model,
        "training": {"batch_size": 4, "learning_rate": 0.1},
        "method": {"name": "fedavg"},
        "run": {"seed": seed, "engine": "serial"},
    }
    return load_experiment(document, experiment_catalogue(), folder=folder)


def trained(
    model: dict[str, Any], learned: SiteTask, seed: int, folder: Path
) -> GlobalModel:
    """Return a model that one client has trained for an epoch."""
    assembly = assemble(experiment_of(model, seed, folder), learned.spec)
    drawn = RandomKey(5).numpy().integers(0, 256, (8, *learned.spec.image_shape), "u1")
    examples = Examples(torch.from_numpy(drawn), torch.arange(8) % 4)
    task = assembly.task
    result = local_sgd(task, task.initial_weights, examples, 0.1, RandomKey(6))
    return global_model(assembly.experiment, task, learned, result.weights)


def started(
    model: dict[str, Any], learned: SiteTask, folder: Path, seed: int = 9
) -> FlatModel:
    return assemble(experiment_of(model, seed, folder), learned.spec).task.model


def named(model: FlatModel) -> dict[str, Tensor]:
    return model.named(model.read())


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Return a file of weights of a network of torchvision."""
    with RandomKey(4).torch():
        network = import_torchvision().models.shufflenet_v2_x0_5(num_classes=1000)
    path = tmp_path / "shufflenet.safetensors"
    save_file(network.state_dict(), path)
    return str(path)


WHOLE: list[tuple[dict[str, Any], SiteTask]] = [
    ({"name": "tiny_cnn", "embedding_dim": 8, "norm": "batch"}, GREY),
    ({"name": "small_resnet", "embedding_dim": 128}, COLOUR),
    ({"name": "model:Net", "hidden": 5}, GREY),
    ({"name": "model:Net", "representation": "norm"}, GREY),
    ({"name": "torchvision", "architecture": "shufflenet_v2_x0_5"}, COLOUR),
]


@pytest.mark.parametrize(("model", "learned"), WHOLE)
@pytest.mark.parametrize("place", ["exported", f"exported/{WEIGHTS}", "run"])
def test_training_starts_from_the_weights_of_an_exported_model(
    model: dict[str, Any], learned: SiteTask, place: str, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(OWN_NETWORK)
    small = {"image_size": 32} if model["name"] == "torchvision" else {}
    model = {**model, **small}
    first = trained(model, learned, 1, tmp_path)
    folder = tmp_path / ("run/model" if place == "run" else "exported")
    save_model(folder, first)
    found = started({**model, "weights": str(tmp_path / place)}, learned, tmp_path)
    assert torch.equal(found.read(), first.weights)
    other = started(model, learned, tmp_path)
    assert not torch.equal(other.read(), first.weights)


PARTS: list[dict[str, Any]] = [
    {"trained": "head"},
    {"trained": "last_blocks", "num_blocks": 2},
    {"trained": "lora", "lora": {"rank": 2, "targets": ["branch2.0"]}},
]


@pytest.mark.integration
@pytest.mark.parametrize("part", PARTS, ids=lambda part: str(part["trained"]))
def test_trained_part_starts_beside_the_file_of_its_frozen_weights(
    part: dict[str, Any], base: str, tmp_path: Path
) -> None:
    if part["trained"] == "lora":
        pytest.importorskip("peft")
    network = {
        "name": "torchvision",
        "architecture": "shufflenet_v2_x0_5",
        "image_size": 32,
    }
    model = {**network, **part}
    first = trained({**model, "weights": base}, COLOUR, 1, tmp_path)
    save_model(tmp_path / "exported", first)
    exported = str(tmp_path / "exported")
    found = started({**model, "weights": [base, exported]}, COLOUR, tmp_path)
    assert torch.equal(found.read(), first.weights)
    assert found.frozen == first.task.frozen
    with pytest.raises(ConfigError, match=r"weights: \[FILE, .*exported"):
        started({**model, "weights": exported}, COLOUR, tmp_path)
    whole = {**network, "weights": [base, exported]}
    if part["trained"] == "lora":
        with pytest.raises(ConfigError, match=r"lora_A.*the model has no such tensor"):
            started(whole, COLOUR, tmp_path)
    else:
        everything = named(started(whole, COLOUR, tmp_path))
        for name, tensor in named(found).items():
            assert torch.equal(everything[name], tensor)


def test_whole_model_may_be_the_frozen_one_of_the_next_run(tmp_path: Path) -> None:
    model, learned = WHOLE[0]
    first = trained(model, learned, 1, tmp_path)
    save_model(tmp_path / "exported", first)
    start = {**model, "weights": str(tmp_path / "exported")}
    expected = first.task.model.named(first.weights)
    head = started({**start, "trained": "head"}, learned, tmp_path)
    state = head.module.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert head.num_weights == 8 * 4 + 4


def test_head_for_other_classes_is_left_out(tmp_path: Path) -> None:
    model, learned = WHOLE[0]
    first = trained(model, learned, 1, tmp_path)
    save_model(tmp_path / "exported", first)
    more = replace(
        learned,
        spec=replace(learned.spec, num_classes=6),
        class_names=tuple("abcdef"),
    )
    start = {**model, "weights": str(tmp_path / "exported")}
    found, fresh = named(started(start, more, tmp_path)), started(model, more, tmp_path)
    expected = first.task.model.named(first.weights)
    assert found.keys() == named(fresh).keys() == expected.keys()
    for name, tensor in named(fresh).items():
        of_head = name.startswith("classifier.")
        assert torch.equal(found[name], tensor if of_head else expected[name])


def test_model_of_other_classes_whose_head_alone_was_trained_is_refused(
    base: str, tmp_path: Path
) -> None:
    network = {
        "name": "torchvision",
        "architecture": "shufflenet_v2_x0_5",
        "image_size": 32,
    }
    model = {**network, "trained": "head"}
    save_model(
        tmp_path / "exported",
        trained({**model, "weights": base}, COLOUR, 1, tmp_path),
    )
    more = SiteTask(replace(COLOUR.spec, num_classes=6), tuple("abcdef"))
    with pytest.raises(ConfigError, match=r"classifier.*expected shape \(6.*found \(4"):
        started(
            {**model, "weights": [base, str(tmp_path / "exported")]}, more, tmp_path
        )


def test_exported_model_of_another_network_is_refused(tmp_path: Path) -> None:
    model, learned = WHOLE[0]
    save_model(tmp_path / "exported", trained(model, learned, 1, tmp_path))
    start = {"weights": str(tmp_path / "exported")}
    with pytest.raises(ConfigError, match=r"expected shape \(16, .*found \(8, "):
        started({**model, "embedding_dim": 16, **start}, learned, tmp_path)
    with pytest.raises(ConfigError, match="more tensors do not fit"):
        started({"name": "small_resnet", **start}, COLOUR, tmp_path)


def with_layout(folder: Path, change: Any) -> None:
    path = folder / WEIGHTS
    with safe_open(path, framework="pt") as file:
        layout = json.loads(file.metadata()[LAYOUT])
    change(layout)
    save_file(load_file(path), path, {LAYOUT: json.dumps(layout)})


CHANGES: Sequence[Any] = (
    lambda layout: layout.pop("tensors"),
    lambda layout: layout["tensors"].pop(),
    lambda layout: layout["tensors"][0][1].append(2),
    lambda layout: layout["tensors"].append(["more", [10**18]]),
    lambda layout: layout.update(memory_format="sideways"),
    lambda layout: layout.update(tensors=[[1, "x"]]),
    lambda layout: layout.update(tensors={"a": [1]}),
)


@pytest.mark.parametrize("change", CHANGES)
def test_damaged_layout_is_refused(change: Any, tmp_path: Path) -> None:
    model, learned = WHOLE[0]
    folder = tmp_path / "exported"
    save_model(folder, trained(model, learned, 1, tmp_path))
    with_layout(folder, change)
    with pytest.raises(ConfigError, match=r"exported/model\.safetensors is damaged"):
        started({**model, "weights": str(folder)}, learned, tmp_path)


def test_exported_model_in_contiguous_memory_is_the_same_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(OWN_NETWORK)
    first = trained({"name": "model:Net"}, GREY, 1, tmp_path)
    assert first.card.model["memory_format"] == "contiguous"
    save_model(tmp_path / "exported", first)
    local = tmp_path / "local.yaml"
    local.write_text("own_code: {folder: ., allowed: ['model:Net']}\n")
    monkeypatch.setenv("KNNPER_LOCAL", str(local))
    from knnper.own import local_door

    again = load_model(tmp_path / "exported", local_door())
    images = torch.arange(2 * 64, dtype=torch.uint8).view(2, 8, 8, 1)
    assert torch.equal(again.embed(images), first.embed(images))
    save_model(tmp_path / "copied", again)
    files = (tmp_path / name / WEIGHTS for name in ("exported", "copied"))
    assert len({file.read_bytes() for file in files}) == 1
