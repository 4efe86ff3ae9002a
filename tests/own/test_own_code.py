"""What users bring as ``module:attribute``: found, set, fingerprinted, explained."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from knnper.embedding_model import ModelSettings, OwnModelSettings
from knnper.errors import ConfigError, OwnCodeError, RunError
from knnper.experiment import Experiment
from knnper.experiment_file import (
    from_json,
    load_experiment,
    read_experiment,
    results_identity,
    to_json,
    to_yaml,
)
from knnper.flat_model import FlatModel
from knnper.models import build_model
from knnper.own import Door, Kind, explained
from knnper.seeding import RandomKey
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.settings import Choice, Own
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.workbench import open_workbench
from knnper.split_network import SplitNetwork, split
from knnper.strategies.core.frozen import of_embeddings
from knnper.strategies.core.training import local_sgd
from knnper.trained_layers import train_only
from tests.own.import_path import clean_import_path

MODEL = """
import torch
from torch import nn
from width import WIDTH

class Net(nn.Module):
    def __init__(self, num_classes: int, input_shape: tuple[int, ...],
                 hidden: int, slope: float = 0.0, act: nn.Module = nn.ReLU()):
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(input_shape[1] * input_shape[2], hidden * WIDTH),
            nn.LeakyReLU(slope))
        self.out = nn.Linear(hidden * WIDTH, num_classes)

    def forward(self, x):
        return self.out(self.body(x))

def no_softmax(num_classes: int):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes), nn.Softmax(dim=1))

def smoothed(logits, labels, amount: float = 0.1):
    return nn.functional.cross_entropy(logits, labels, label_smoothing=amount)

def failing(logits, labels):
    raise ValueError("on purpose")
"""
METHOD = '''
from dataclasses import dataclass
from knnper.settings import Settings
from knnper.strategies.core.method import Method

@dataclass(frozen=True)
class HalfSettings(Settings):
    share: float = 0.5

class Half(Method):
    """Moves a part of the way to the mean."""

    title = "Half way"
    ends_with_global_model = True
    settings: HalfSettings

    def aggregate(self, state, updates):
        mean = super().aggregate(state, updates)
        moved = state.weights + self.settings.share * (mean.weights - state.weights)
        return type(state)(moved)
'''
POLICY = """
import numpy as np
from knnper.datastore.policy import Policy

class KeepOdd(Policy):
    needs_capacity = False

    def _evict(self, batch):
        labels = np.concatenate([batch.stored.labels, batch.arriving.labels])
        return np.flatnonzero(labels % 2 == 0), batch.state.was_largest
"""
DOCUMENT: dict[str, Any] = {
    "name": "own",
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "num_clients": 6, "alpha": 0.5},
    "model": {"name": "model:Net", "hidden": 8},
    "training": {
        "num_rounds": 2,
        "participation": 0.5,
        "learning_rate": 0.01,
        "optimizer": {"name": "AdamW", "betas": [0.8, 0.9]},
        "loss": {"name": "model:smoothed", "amount": 0.2},
    },
    "method": {"name": "fedavg"},
    "run": {"engine": "serial"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "width.py").write_text("WIDTH = 2\n")
    (tmp_path / "halfway.py").write_text(METHOD)
    (tmp_path / "keeping.py").write_text(POLICY)
    with clean_import_path("model", "width", "halfway", "keeping"):
        yield tmp_path


def load(folder: Path, **sections: object) -> Experiment:
    document = {**DOCUMENT, **sections}
    return load_experiment(document, experiment_catalogue(), folder=folder)


def problem(folder: Path, **sections: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, **sections)
    return str(caught.value)


def test_what_can_be_set_is_what_it_takes(folder: Path) -> None:
    chosen = load(folder).model.settings
    assert vars(chosen)["hidden"] == 8
    assert vars(chosen)["slope"] == 0.0
    assert isinstance(chosen, OwnModelSettings)
    wrong = {"name": "model:Net", "hiden": 8, "slope": "steep"}
    told = problem(folder, model=wrong)
    assert "model.hiden: unknown setting; did you mean 'hidden'?" in told
    assert 'model.slope: found "steep", expected a number' in told
    assert "model.hidden: expected a value, found nothing" in told


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"model": {"name": "model:Nets"}}, "model has no 'Nets'; did you mean 'Net'?"),
        ({"model": {"name": "modle:Net"}}, "found no module 'modle' in "),
        ({"model": {"name": "halfway:HalfSettings"}}, None),
        ({"method": {"name": "model:Net"}}, "expected a subclass of knnper.Method"),
    ],
)
def test_what_is_not_there_is_told(
    folder: Path, section: dict[str, Any], expected: str | None
) -> None:
    if expected is None:
        with pytest.raises((ConfigError, OwnCodeError), match=r"expected a nn\.Module"):
            open_workbench(load(folder, **section))
        return
    assert expected in problem(folder, **section)


def test_errors_of_the_file_are_those_of_its_writer(folder: Path) -> None:
    (folder / "model.py").write_text("def Net(:\n")
    assert "model.py" in (told := problem(folder))
    assert "SyntaxError" in told
    (folder / "model.py").write_text("import no_such_library\n")
    assert "no_such_library" in problem(folder)


def test_a_file_beside_the_experiment_is_read_as_it_is_now(folder: Path) -> None:
    first = load(folder)
    assert load(folder).model.fingerprint == first.model.fingerprint
    (folder / "width.py").write_text("WIDTH = 3\n")
    other = load(folder)
    assert other.model.fingerprint != first.model.fingerprint
    assert results_identity(other) != results_identity(first)
    sizes = [open_workbench(one).task.model.num_weights for one in (first, other)]
    assert sizes == [64 * w + w + w * 10 + 10 for w in (16, 24)]


def test_each_folder_has_its_own_helpers(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Files of one name in two folders, also where one is on the Python path."""
    other = tmp_path_factory.mktemp("other")
    (other / "model.py").write_text(MODEL)
    (other / "width.py").write_text("WIDTH = 5\n")
    sys.path.append(str(other))  # the fixture takes it away again
    widths = [
        open_workbench(load(one)).task.model.module.embedding_dim
        for one in (folder, other, folder)
    ]
    assert widths == [16, 40, 16]


def test_a_module_beside_another_experiment_is_not_found(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    load(folder)
    told = problem(tmp_path_factory.mktemp("other"))
    assert "model.name: model:Net: found no module 'model' in " in told
    # Nor is that of a folder whose file is gone.
    load(folder)
    (folder / "model.py").unlink()
    assert "found no module 'model' in " in problem(folder)


def test_two_parts_of_one_file_are_of_one_module(folder: Path) -> None:
    (folder / "loss.py").write_text(
        "from model import Net, smoothed\n\ndef loss(logits, labels):\n"
        "    return smoothed(logits, labels)\n"
    )
    training = {**DOCUMENT["training"], "loss": "loss:loss"}
    experiment = load(folder, training=training)
    of_loss = sys.modules["loss"]
    assert experiment.model.entry is vars(of_loss)["Net"]


def test_the_source_of_an_installed_package_is_all_that_it_imports_of_itself(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("site")
    (root / "ourpackage").mkdir()
    (root / "ourpackage" / "__init__.py").write_text("")
    (root / "ourpackage" / "net.py").write_text("from .part import value\n")
    (root / "ourpackage" / "part.py").write_text("value = int\n")
    sys.path.append(str(root))
    first = Door(folder).open("ourpackage.net:value", Kind("a class")).fingerprint
    (root / "ourpackage" / "part.py").write_text("value = str\n")
    assert Door(folder).open("ourpackage.net:value", Kind("a class")).fingerprint != (
        first
    )


def test_a_file_cannot_have_the_name_of_a_loaded_module(folder: Path) -> None:
    (folder / "torch.py").write_text(MODEL)
    told = problem(folder, model={"name": "torch:Net", "hidden": 8})
    assert "rename the file" in told


def test_an_experiment_with_own_code_is_written_and_read(folder: Path) -> None:
    first = load(folder)
    assert first.own_code == str(folder)
    assert from_json(to_json(first), experiment_catalogue()) == first
    elsewhere = folder / "runs"
    elsewhere.mkdir()
    (elsewhere / "e.yaml").write_text(to_yaml(first))
    assert read_experiment(elsewhere / "e.yaml", experiment_catalogue()) == first
    (elsewhere / "e.yaml").write_text(
        to_yaml(replace(first, own_code=None)) + "own_code: ..\n"
    )
    again = read_experiment(elsewhere / "e.yaml", experiment_catalogue())
    assert results_identity(again) == results_identity(first)


def test_only_what_is_allowed_comes_through_the_door(folder: Path) -> None:
    kind = Kind("anything")
    found = Door(folder, {"model:Net"}).open("model:Net", kind)
    assert isinstance(found, Own)
    with pytest.raises(OwnCodeError, match="which may not be used here"):
        Door(folder, {"model:Net"}).open("model:smoothed", kind)
    with pytest.raises(OwnCodeError, match="which may not be used here"):
        Door(folder, ()).open("os:remove", kind)


def run(experiment: Experiment, path: Path) -> dict[str, Any]:
    folder = RunFolder.create(path, experiment, overwrite=True)
    return dict(simulate(open_workbench(experiment), folder, Observer(), ["test"]))


def test_an_own_method_is_one_of_ours(folder: Path) -> None:
    """All of the way is FedAvg; none of it leaves the initial weights."""
    whole = run(
        load(folder, method={"name": "halfway:Half", "share": 1.0}), folder / "whole"
    )
    fedavg = run(load(folder), folder / "fedavg")
    none = load(folder, method={"name": "halfway:Half", "share": 0.0})
    assert whole["seen"]["accuracy_mean"] == fedavg["seen"]["accuracy_mean"]
    assert whole["title"] == "Half way"
    initial = open_workbench(none).task.initial_weights
    run(none, folder / "none")
    state = next((folder / "none").glob("checkpoints/round-000002/*.safetensors"))
    from safetensors.torch import load_file

    (weights,) = load_file(state).values()
    assert torch.equal(weights, initial)


def test_an_own_policy_decides_what_a_memory_keeps(folder: Path) -> None:
    store = {"policy": "keeping:KeepOdd"}
    chosen = {"name": "knn", "store": store}
    experiment = load(folder, personalization=chosen)
    assert [*experiment.own()][-1] == "personalization.store.policy"
    bench = open_workbench(experiment)
    data, rng = bench.clients.data("0000"), RandomKey(1)
    payload = bench.method.broadcast(bench.method.init(["0000"], rng), "", rng)
    predictor: Any = bench.method.personalize(payload, None, data, rng)
    voted = predictor.explain(data.train.images).vote.neighbors.labels
    assert voted.numel()
    assert bool((voted % 2 == 1).all())
    again = from_json(to_json(experiment), experiment_catalogue())
    assert results_identity(again) == results_identity(experiment)
    told = problem(
        folder, personalization={"name": "knn", "store": {"policy": "model:Net"}}
    )
    assert "expected a subclass of knnper.datastore.policy.Policy" in told
    told = problem(folder, personalization={"name": "knn", "store": {"policy": "fifa"}})
    assert "did you mean 'fifo'" in told


def test_code_that_changed_is_told_and_never_mixed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = load(folder)
    place = RunFolder.create(folder / "run", experiment)
    place.write_manifest(experiment, "split", ["test"])
    (folder / "width.py").write_text("WIDTH = 5\n")
    changed = place.experiment(experiment_catalogue())
    assert "model:Net, model:smoothed changed since the run" in caplog.text
    with pytest.raises(RunError, match="restore the code, or start again"):
        place.write_manifest(changed, "split", ["test"])


def test_a_failure_shows_the_users_lines(folder: Path) -> None:
    training = {**DOCUMENT["training"], "loss": "model:failing"}
    experiment = load(folder, training=training)
    with pytest.raises(OwnCodeError) as caught:
        run(experiment, folder / "run")
    told = str(caught.value)
    assert told.startswith(f"{folder / 'model.py'} failed:")
    assert 'raise ValueError("on purpose")' in told
    assert told.endswith("ValueError: on purpose")
    assert "site-packages" not in told


def test_an_error_that_is_nobodys_stays_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), explained():
        _ = 1 / 0


# A step of each optimizer against torch's own on the module's own parameters.
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "Adam"},
        {"name": "AdamW", "weight_decay": 0.3},
        {"name": "RMSprop", "momentum": 0.5},
        {"name": "Adagrad", "initial_accumulator_value": 0.1},
        {"name": "torch.optim:Adafactor"},
        {"name": "SGD", "nesterov": True},
    ],
)
def test_training_is_torchs_own(folder: Path, optimizer: dict[str, Any]) -> None:
    momentum = 0.9 if optimizer["name"] == "SGD" else 0.0
    training = {
        **{"learning_rate": 0.05, "batch_size": 1000, "local_steps": 3},
        **{"momentum": momentum, "optimizer": optimizer},
    }
    bench = open_workbench(load(folder, training=training))
    task, data = bench.task, bench.clients.data("0000").train
    start = task.initial_weights
    found = local_sgd(task, start, data, 0.05, RandomKey(3)).weights

    task.model.load(start)
    copy = build_copy(task.model.module)
    kind: Any = getattr(torch.optim, optimizer["name"].rpartition(":")[2])
    settings = {key: one for key, one in optimizer.items() if key != "name"}
    if momentum:
        settings["momentum"] = momentum
    steps = kind(copy.parameters(), lr=0.05, **settings)
    for _ in range(3):
        steps.zero_grad()
        logits = copy(task.normalize(data.images))
        nn.functional.cross_entropy(logits, data.labels).backward()  # type: ignore[no-untyped-call]
        steps.step()
    expected = torch.cat([one.detach().flatten() for one in copy.parameters()])
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, start, atol=1e-3)


def build_copy(module: nn.Module) -> nn.Sequential:
    layers = nn.Linear(64, 16), nn.LeakyReLU(0.0), nn.Linear(16, 10)
    copy = nn.Sequential(nn.Flatten(), *layers)
    copy.load_state_dict(
        dict(zip(copy.state_dict(), module.state_dict().values(), strict=True))
    )
    return copy


def test_other_optimizers_are_refused_by_methods_of_sgd(folder: Path) -> None:
    told = problem(folder, method={"name": "scaffold"})
    assert "found AdamW with SCAFFOLD, expected SGD: its control variates" in told
    told = problem(folder, method={"name": "fedem"})
    assert "found model:smoothed with FedEM, expected cross_entropy: its resp" in told
    training = {"momentum": 0.9, "optimizer": "Adam"}
    told = problem(folder, training=training)
    assert "training.momentum: found 0.9, a setting of SGD, with Adam" in told


def test_class_weights_and_clipping(folder: Path) -> None:
    """One full-batch step against the gradient by hand."""
    training = {
        **{"learning_rate": 1.0, "batch_size": 1000, "local_steps": 1},
        **{"class_weights": "balanced", "clip_norm": 0.05},
    }
    bench = open_workbench(load(folder, training=training))
    task, data = bench.task, bench.clients.data("0001").train
    start = task.initial_weights
    found = local_sgd(task, start, data, 1.0, RandomKey(1)).weights
    counts = torch.bincount(data.labels, minlength=10)
    weights = len(data) / (int((counts > 0).sum()) * counts.clamp(min=1).float())
    task.model.load(start)
    losses = nn.functional.cross_entropy(
        task.model.module(task.normalize(data.images)), data.labels, reduction="none"
    )
    loss = (losses * weights[data.labels]).mean()
    (gradient,) = [task.model.gradient.zero_()]
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(gradient.norm()) > 0.05
    expected = start - gradient * (0.05 / gradient.norm())
    assert torch.allclose(found, expected, atol=1e-6)


def test_each_class_has_a_weight(folder: Path) -> None:
    training = {"class_weights": [1.0, 2.0]}
    with pytest.raises(ConfigError, match="found 2 values, expected one for each of"):
        open_workbench(load(folder, training=training))


def test_a_mean_cannot_be_weighted(folder: Path) -> None:
    training = {**DOCUMENT["training"], "class_weights": "balanced"}
    bench = open_workbench(load(folder, training=training))
    data = bench.clients.data("0000").train
    with pytest.raises(OwnCodeError, match="returns a mean"):
        local_sgd(bench.task, bench.task.initial_weights, data, 0.1, RandomKey(0))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("model:right", "returned torch.float32 without a gradient"),
        (
            "torch.nn:BCEWithLogitsLoss",
            r"failed on logits \(32, 10\) and labels \(32,\)",
        ),
    ],
)
def test_a_loss_that_trains_nothing_is_told(
    folder: Path, loss: str, expected: str
) -> None:
    with (folder / "model.py").open("a") as file:
        file.write("def right(logits, labels):\n")
        file.write("    return (logits.argmax(dim=1) == labels).float()\n")
    bench = open_workbench(load(folder, training={"loss": loss}))
    data = bench.clients.data("0000").train
    with pytest.raises(OwnCodeError, match=expected):
        local_sgd(bench.task, bench.task.initial_weights, data, 0.1, RandomKey(0))


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "Adam", "betas": [2.0, 0.9]},
        {"name": "torch.optim:LBFGS", "max_iter": "many"},
    ],
)
def test_an_optimizer_is_tried_before_the_first_round(
    folder: Path, optimizer: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"training\.optimizer"):
        open_workbench(load(folder, training={"optimizer": optimizer}))


OPTIMIZERS = """
import torch

class Sharpness(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "two passes a step"

class Forgetful(torch.optim.SGD):
    def step(self, closure=None):
        return self.defaults["rho"]
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torch.optim:LBFGS", "needs a closure"),
        ("torch.optim:SparseAdam", "does not support dense gradients"),
        ("stepping:Sharpness", "AssertionError: two passes a step"),
        ("stepping:Forgetful", "KeyError: 'rho'"),
        ("torch.optim.lr_scheduler:ExponentialLR", r"training\.schedule"),
        ("torch.nn.functional:relu", "found function, expected a class of torch opt"),
    ],
)
def test_load_refuses_optimizer_that_cannot_make_a_plain_step(
    folder: Path, name: str, reason: str
) -> None:
    (folder / "stepping.py").write_text(OPTIMIZERS)
    found = problem(folder, training={"optimizer": name})
    assert re.search(rf"training\.optimizer\.name: .*{reason}", found, re.DOTALL)


class Residual(nn.Module):
    """A network whose last linear layer is not the last module that it defines."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)
        self.convolution = nn.Conv2d(1, 6, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.convolution(x).amax(dim=(2, 3)))
        return found


def test_a_network_is_split_at_its_last_linear_layer() -> None:
    network, images = Residual(), torch.randn(5, 1, 8, 8)
    expected = network(images)
    found = split(network, torch.zeros(2, 1, 8, 8), 4)
    assert torch.equal(found(images), expected)
    assert (found.embedding_dim, found.num_classes) == (6, 4)
    assert torch.equal(found.head(found.embed(images)), expected)


def test_a_representation_can_be_named() -> None:
    network, images = Residual(), torch.randn(5, 1, 8, 8)
    expected = network.convolution(images).mean(dim=(2, 3))
    found = split(network, torch.zeros(2, 1, 8, 8), 4, "convolution")
    assert torch.equal(found.embed(images), expected)
    assert found(images).shape == (5, 4)
    names = [name for name, _ in found.named_parameters()]
    assert not [name for name in names if "head" in name or "unused" in name]
    with pytest.raises(ConfigError, match="did you mean 'convolution'"):
        split(Residual(), torch.zeros(2, 1, 8, 8), 4, "convolutions")


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), "returned 3 logits, expected"),
        (nn.Flatten(), "returned 64 logits"),
        (nn.Conv2d(1, 4, 3), "expected (2, number of classes)"),
        (nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten()), "has no linear layer"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Softmax(dim=1)),
            "changes the output of its last linear layer, 1",
        ),
        (nn.Sequential(nn.Linear(5, 4)), "failed on inputs torch.float32 of shape"),
    ],
)
def test_what_is_no_classifier_is_refused(network: nn.Module, expected: str) -> None:
    with pytest.raises(OwnCodeError) as caught:
        split(network, torch.zeros(2, 1, 8, 8), 4)
    assert expected in str(caught.value)


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.two(self.one(x)))
        return found


def test_a_weight_that_two_layers_share_is_trained_with_either() -> None:
    assert FlatModel(split(Tied(), torch.zeros(2, 6), 4)).frozen == ""
    network = split(Tied(), torch.zeros(2, 6), 4)
    train_only(network, ModelSettings(trained="last_blocks"))
    weight = network.features.get_submodule("two").weight
    assert isinstance(weight, Tensor)
    names = {entry.name for entry in FlatModel(network).entries}
    assert weight.requires_grad
    assert "features.one.weight" in names
    assert "features.one.bias" not in names


def test_what_a_network_freezes_itself_is_kept_with_its_weights() -> None:
    network = split(Residual(), torch.zeros(2, 1, 8, 8), 4)
    for parameter in network.features.parameters():
        parameter.requires_grad_(False)
    flat = FlatModel(network)
    assert {entry.name for entry in flat.entries} == {
        "classifier.weight",
        "classifier.bias",
    }
    assert len(flat.frozen) == 64
    for parameter in network.classifier.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(OwnCodeError, match="has no parameter to train"):
        FlatModel(network)


def test_a_representation_that_is_never_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="found 'unused', which forward does not run"):
        split(Residual(), torch.zeros(2, 1, 8, 8), 4, "unused")


class Scaled(SplitNetwork):
    """A model that says itself what its head makes of an embedding."""

    def head(self, z: Tensor) -> Tensor:
        """Return other logits."""
        return -5 * super().head(z)


def test_a_head_of_ones_own_is_not_taken_for_the_last_layer(folder: Path) -> None:
    task = open_workbench(load(folder, training={})).task
    scaled = Scaled(nn.Flatten(), nn.Linear(64, 10))
    train_only(scaled, ModelSettings(trained="head"))
    own = replace(task, model=FlatModel(scaled))
    assert of_embeddings(own) is own


def test_initial_weights_are_those_of_the_seed(folder: Path) -> None:
    experiment = load(folder)
    spec = open_workbench(experiment).task.spec
    choice: Choice[Any] = experiment.model
    one, same, other = (
        build_model(choice, spec, RandomKey(seed)).read() for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
