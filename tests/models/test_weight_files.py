"""Weights as others write them: wrapped, nested, of other types, under other names."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from knnper.data.examples import InputSpec
from knnper.embedding_model import (
    EmbeddingModel,
    ModelSettings,
    Network,
    OwnModelSettings,
)
from knnper.errors import ConfigError
from knnper.models import build_model, with_whole_paths
from knnper.seeding import RandomKey
from knnper.settings import Choice

ROWS = InputSpec((1, 1, 6), 3, (0.0,) * 6, (1.0,) * 6, dtype="float32")
Names = Mapping[str, Any]


class Net(nn.Module):
    """Two layers with a norm, as a user writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.f = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.f(self.norm(self.a(x)))
        return logits


def state_of(seed: int = 7) -> dict[str, Tensor]:
    with RandomKey(seed).torch():
        network = Net()
        for buffer in (network.norm.running_mean, network.norm.running_var):
            assert buffer is not None
            buffer.copy_(torch.rand(4))
    return {name: one.clone() for name, one in network.state_dict().items()}


def choice_of(
    *weights: Path | str, entry: Callable[..., nn.Module] = Net, **settings: Any
) -> Choice[Any]:
    names = tuple(map(str, weights))
    chosen = OwnModelSettings(
        weights=names if len(names) != 1 else names[0], **settings
    )
    return Choice("model:Net", chosen, entry)


def loaded(*weights: Path | str, **settings: Any) -> dict[str, Tensor]:
    """Return the tensors of the network by its own names, once they are loaded."""
    model = build_model(choice_of(*weights, **settings), ROWS, RandomKey(1))
    named = model.named(model.read())
    return {
        name.replace("classifier", "f").removeprefix("features."): one
        for name, one in named.items()
    }


def is_state(found: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(found[name], state[name]) for name in found)


def refused(*weights: Path | str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(*weights, **settings)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "weights.pt"


# --- wrapped and nested


def under(prefix: str) -> Callable[[Names], Names]:
    return lambda state: {f"{prefix}{name}": one for name, one in state.items()}


def inside(key: str, prefix: str = "", **more: Any) -> Callable[[Names], Names]:
    return lambda state: {**more, key: under(prefix)(state)}


def inserted(state: Names) -> Names:
    return {
        name.replace("norm.", "norm._orig_mod."): one for name, one in state.items()
    }


def as_run_model(state: Names) -> Names:
    """Return names as `Run.model` has them."""
    return {
        name.replace("f.", "classifier.") if name[0] == "f" else f"features.{name}": one
        for name, one in state.items()
    }


OPTIMIZER = {
    "state": {0: {"exp_avg": torch.zeros(4, 6)}},
    "param_groups": [{"lr": 0.1}],
}


@pytest.mark.parametrize(
    "wrap",
    [
        *map(under, ("module.", "_orig_mod.", "_module.", "module._orig_mod.")),
        *map(
            under, ("model.", "net.", "model.module.", "_orig_mod.module.", "my.own.")
        ),
        *map(inside, ("state_dict", "model", "model_state_dict", "model_state", "net")),
        *map(inside, ("ema", "module", "network", "params", "generator")),
        inside("state_dict", "model.", epoch=3, hyper_parameters={"lr": 0.1}),
        inside("state_dict", "model.", optimizer_states=[OPTIMIZER]),
        inside("model", "module.", optimizer=OPTIMIZER, best=np.float64(0.5)),
        inside("model", args=argparse.Namespace(lr=0.1), history=np.zeros(3)),
        lambda state: {"trainer": inside("model", "_module.")(state)},
        lambda state: {**under("model.")(state), "loss.weight": torch.ones(3)},
        lambda state: {"state_dict": {**under("net.")(state), "auc.n": torch.ones(1)}},
        lambda state: {"model": state, "best_model": dict(state)},
        lambda state: {**state, "epoch": 3},
        inserted,
        as_run_model,
        lambda state: under("module.")(as_run_model(state)),
    ],
)
def test_weights_are_taken_from_wherever_they_are(
    wrap: Callable[[Names], Names], file: Path
) -> None:
    state = state_of()
    torch.save(wrap(state), file)
    assert is_state(loaded(file), state)


def test_file_with_two_sets_of_weights_is_refused_with_both_prefixes(
    file: Path,
) -> None:
    torch.save({"model": state_of(), "model_ema": state_of(8), "epoch": 3}, file)
    message = refused(file)
    assert "'model.' and 'model_ema.'" in message
    assert message.count("\n") == 1


def test_misfits_under_a_prefix_are_listed_by_their_names_in_the_file(
    file: Path,
) -> None:
    state = state_of()
    state["a.bias"] = torch.zeros(5)
    del state["a.weight"]
    torch.save({"state_dict": {**under("net.")(state), "net.x": torch.zeros(1)}}, file)
    message = refused(file)
    assert "state_dict.net.a.bias: expected shape (4,), found (5,)" in message
    assert "a.weight: the file has no such tensor" in message
    assert "state_dict.net.x: the model has no such tensor" in message
    assert message.count("\n") == 3


def test_file_of_another_model_is_refused_in_one_line(file: Path) -> None:
    torch.save({f"layer{n}.conv.weight": torch.zeros(1) for n in range(90)}, file)
    message = refused(file)
    assert "none of the 90 names" in message
    assert "layer0.conv.weight" in message
    assert "expected a.weight, a.bias" in message
    assert message.count("\n") == 1
    torch.save({**state_of(), **{f"more.{n}": torch.ones(1) for n in range(90)}}, file)
    assert "82 more tensors do not fit" in refused(file)


# --- where the file is, and what it is


@pytest.mark.parametrize("suffix", ["PT", "PTH", "pth", "bin", "ckpt", "tar", ""])
@pytest.mark.parametrize("is_archive", [True, False])
def test_suffix_of_a_torch_file_is_of_no_account(
    tmp_path: Path, suffix: str, is_archive: bool
) -> None:
    file, state = tmp_path / "weights", state_of()
    file = file.with_suffix(f".{suffix}") if suffix else file
    torch.save(state, file, _use_new_zipfile_serialization=is_archive)
    assert is_state(loaded(file), state)


@pytest.mark.parametrize("name", ["w.SafeTensors", "w.SAFETENSORS", "w.pt", "w"])
def test_suffix_of_a_safetensors_file_is_of_no_account(
    tmp_path: Path, name: str
) -> None:
    # The length of the header may begin as a pickle does.
    for padding in range(64):
        save_file(state_of(), tmp_path / name, {"padding": "x" * padding})
        if (tmp_path / name).read_bytes()[0] == 0x80:
            break
    assert (tmp_path / name).read_bytes()[0] == 0x80
    assert is_state(loaded(tmp_path / name), state_of())


def test_tilde_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.save(state_of(), tmp_path / "weights.pt")
    assert is_state(loaded("~/weights.pt"), state_of())
    whole = with_whole_paths(choice_of("~/weights.pt", "no_such_weights"))
    assert whole.settings.weights == (str(tmp_path / "weights.pt"), "no_such_weights")


def test_later_files_replace_what_earlier_ones_hold(tmp_path: Path) -> None:
    for seed in (1, 2):
        torch.save(state_of(seed), tmp_path / f"{seed}.pt")
    body = {name: one for name, one in state_of(3).items() if name[0] != "f"}
    torch.save(body, tmp_path / "3.pt")
    found = loaded(*(tmp_path / f"{n}.pt" for n in (1, 2, 3)))
    assert is_state(found, {**state_of(2), **body})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            Net(),
            "test_weight_files.Net, and reading it would run code",
        ),
        (torch.zeros(3), "holds a Tensor, expected tensors by name"),
        ([state_of()], "holds a list, expected tensors by name"),
    ],
)
def test_files_that_hold_no_names_are_refused(
    file: Path, content: object, message: str
) -> None:
    torch.save(content, file)
    found = refused(file)
    assert message in found
    assert "torch.save(model.state_dict(), FILE)" in found
    assert "weights_only" not in found


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*looks like a TorchScript archive:UserWarning")
def test_scripted_network_and_folder_without_a_model_are_refused(
    tmp_path: Path, file: Path
) -> None:
    torch.jit.trace(Net().eval(), torch.zeros(2, 6)).save(file)  # type: ignore[no-untyped-call]
    assert "a TorchScript archive, which holds code; correct" in refused(file)
    why = refused(tmp_path)
    assert "a folder without model.safetensors" in why
    assert f"knnper fed export {tmp_path} FOLDER" in why


# --- types of numbers


def per_channel(x: Tensor) -> Tensor:
    scales, zeros = torch.full((4,), 1 / 64), torch.zeros(4, dtype=torch.int64)
    quantised: Tensor = torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8)
    return quantised


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize(
    "kind",
    [
        *(Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.to_sparse, nn.Parameter),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.to(torch.float8_e5m2),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.quantize_per_tensor(x, 1 / 64, 0, torch.qint8),
        per_channel,
        lambda x: x.numpy(),
        lambda x: x.numpy().astype(np.float16),
        lambda x: x.T.contiguous().T,
    ],
)
def test_numbers_of_the_same_meaning_are_taken(
    file: Path, kind: Callable[[Tensor], Any]
) -> None:
    state = state_of()
    # Numbers that all types have.
    state["a.weight"] = (torch.arange(24.0).view(4, 6) % 7 - 3) / 4
    torch.save({**state, "a.weight": kind(state["a.weight"])}, file)
    assert is_state(loaded(file), state)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(4, 6).to(torch.int8), "expected torch.float32, found torch.int8"),
        (torch.zeros(4, 6).long(), "expected torch.float32, found torch.int64"),
        (torch.zeros(4, 6).bool(), "expected torch.float32, found torch.bool"),
        (torch.zeros(4, 6) + 5j, "expected torch.float32, found torch.complex64"),
        (torch.zeros(4, 6, device="meta"), "expected numbers, found a tensor without"),
        (torch.full((4, 6), torch.inf), "expected finite numbers, found NaN or inf"),
        (
            torch.full((4, 6), 1e39, dtype=torch.float64),
            "expected finite numbers, found NaN or inf",
        ),
        (torch.zeros(()), "expected shape (4, 6), found ()"),
        (np.zeros((4, 6), int), "expected torch.float32, found torch.int64"),
        ([[0.0] * 6] * 4, "expected a tensor, found a builtins.list"),
        ("a.weight", "expected a tensor, found a builtins.str"),
        (None, "expected a tensor, found a builtins.NoneType"),
        ({"weight": torch.zeros(4, 6)}, "the file has no such tensor"),
    ],
)
def test_what_is_no_numbers_is_refused_by_name_and_type(
    file: Path, value: object, message: str
) -> None:
    torch.save({**state_of(), "a.weight": value}, file)
    assert f"a.weight: {message}" in refused(file)


def test_counters_may_be_means_and_numbers_without_an_axis_are_taken(
    file: Path,
) -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    key = "norm.num_batches_tracked"
    torch.save({**state_of(), key: torch.tensor(12.5), "scale": 4.0}, file)
    model = build_model(choice_of(file, entry=Scaled), ROWS, RandomKey(1))
    state = model.module.state_dict()
    assert float(state["features.scale"]) == 4
    assert state[f"features.{key}"].dtype == torch.int64
    assert int(state[f"features.{key}"]) == 12


# --- models of a user's that are split already


class OwnEmbedding(EmbeddingModel):
    """A model that defines its representation and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = 4, 3
        self.features, self.classifier = nn.Linear(6, 4), nn.Linear(4, 3)

    def embed(self, x: Tensor) -> Tensor:
        return super().embed(x.flatten(1))


class OwnNetwork(Network):
    """A network that takes settings as those of the catalogue do."""

    settings_type = ModelSettings

    def __init__(self, settings: Any, spec: InputSpec) -> None:
        super().__init__(settings, spec)
        self.embedding_dim, self.published_head = 4, "out"
        self.features, self.classifier = nn.Linear(6, 4), nn.Linear(4, 3)

    def embed(self, x: Tensor) -> Tensor:
        return super().embed(x.flatten(1))


@pytest.mark.parametrize(
    ("entry", "head"), [(OwnEmbedding, "classifier"), (OwnNetwork, "out")]
)
def test_embedding_model_of_a_user_starts_from_a_file_too(
    entry: Any, head: str, file: Path
) -> None:
    with RandomKey(7).torch():
        state = OwnEmbedding().state_dict()
    torch.save({name.replace("classifier", head): state[name] for name in state}, file)
    choice = Choice("model:Net", OwnModelSettings(weights=str(file)), entry)
    model = build_model(choice, ROWS, RandomKey(1))
    assert is_state(model.named(model.read()), state)


def test_single_layer_is_its_own_head(file: Path) -> None:
    layer = nn.Linear(6, 3)
    torch.save({"module.weight": layer.weight, "module.bias": layer.bias}, file)
    model = build_model(
        choice_of(file, entry=lambda: nn.Linear(6, 3)), ROWS, RandomKey(1)
    )
    found = model.named(model.read())
    assert torch.equal(found["classifier.weight"], layer.weight)
