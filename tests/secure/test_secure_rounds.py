"""Rounds with secure aggregation over the serial engine, with replies that are lost."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from knnper.client.secure_sums import SECURE
from knnper.errors import ConfigError, RunError
from knnper.experiment_file import load_experiment, to_document
from knnper.secure.messages import (
    KeysRequest,
    RoundPlan,
    UnmaskRequest,
)
from knnper.server.federation import Federation, Reply, Request, Step
from knnper.server.observer import RoundRecord
from knnper.server.rounds import TooManyFailuresError
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.serial_engine import SerialFederation
from knnper.simulation.workbench import CLIENTS, Workbench, open_workbench, runtime_of
from knnper.transport.messages import Purpose
from tests.secure.lost_replies import LosingReplies, Stage, losing, train, trained

DOCUMENT: dict[str, Any] = {
    "name": "secure",
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "num_clients": 5, "alpha": 0.5},
    "model": {"name": "tiny_cnn", "embedding_dim": 8},
    "training": {"num_rounds": 2, "batch_size": 32, "learning_rate": 0.05},
    "method": {"name": "fedavg"},
    "run": {"seed": 0, "engine": "serial"},
}
NAMES = ("0000", "0001", "0002", "0003", "0004")
STAGES: Mapping[str, Stage] = {
    "keys": KeysRequest,
    "shares": RoundPlan,
    "masked": None,
    "unmask": UnmaskRequest,
}


def bench_of(
    secure_aggregation: object,
    privacy: object = None,
    run: Mapping[str, object] | None = None,
    **training: object,
) -> Workbench:
    section = {
        **DOCUMENT["training"],
        "secure_aggregation": secure_aggregation,
        **training,
    }
    document = {
        **DOCUMENT,
        "training": section,
        "privacy": privacy,
        "run": {**DOCUMENT["run"], **(run or {})},
    }
    return open_workbench(load_experiment(document, experiment_catalogue()))


@pytest.fixture(scope="module")
def plain_bench() -> Workbench:
    return bench_of(None)


@pytest.fixture(scope="module")
def secure_bench() -> Workbench:
    return bench_of({"name": "secagg_plus"})


@pytest.fixture(scope="module")
def pairwise_bench() -> Workbench:
    return bench_of({"name": "pairwise"})


def _trained(
    bench: Workbench, folder: Path, lost: Mapping[str, Stage] | None = None
) -> tuple[torch.Tensor, list[RoundRecord]]:
    """Train with replies that are lost in the first round."""
    records: list[RoundRecord] = []
    checkpoint = trained(bench, folder, {1: lost or {}}, records)
    return checkpoint.state.weights, records


def _require_close(secure: torch.Tensor, plain: torch.Tensor) -> None:
    """Numbers are rounded to steps of 2^-19; the second round amplifies that."""
    assert 0 < float((secure - plain).abs().max()) < 1e-4


@pytest.mark.parametrize("stage", [*STAGES, "none"])
def test_trained_model_is_that_of_the_clients_in_the_sum(
    plain_bench: Workbench, secure_bench: Workbench, tmp_path: Path, stage: str
) -> None:
    lost = {"0001": STAGES[stage]} if stage in STAGES else {}
    weights, records = _trained(secure_bench, tmp_path / "secure", lost)
    # The update of a client that is lost only when the sum is unmasked counts.
    is_missing = stage in ("keys", "shares", "masked")
    plain, _ = _trained(
        plain_bench, tmp_path / "plain", {"0001": None} if is_missing else {}
    )
    _require_close(weights, plain)
    assert [record["num_failed"] for record in records] == [int(is_missing), 0]
    assert [record["num_clients"] for record in records] == [5 - is_missing, 5]


def test_drop_outs_beyond_the_threshold_end_the_run(
    secure_bench: Workbench, tmp_path: Path
) -> None:
    for stage in STAGES:
        lost = dict.fromkeys(NAMES[:3], STAGES[stage])
        with pytest.raises(TooManyFailuresError, match="nothing was learned") as raised:
            _trained(secure_bench, tmp_path / stage, lost)
        assert stage == "unmask" or "the reply was lost" in str(raised.value)


def test_round_is_summed_again_only_over_the_same_clients(
    secure_bench: Workbench, tmp_path: Path
) -> None:
    _trained(secure_bench, tmp_path)
    _trained(secure_bench, tmp_path)
    with pytest.raises(TooManyFailuresError, match="revealed"):
        _trained(secure_bench, tmp_path, {"0001": None})


def test_secrets_are_erased_after_each_round(
    secure_bench: Workbench, tmp_path: Path
) -> None:
    _trained(secure_bench, tmp_path)
    files = list((tmp_path / CLIENTS / SECURE).iterdir())
    assert len(files) == 5
    for file in files:
        state = json.loads(file.read_text())
        assert state.pop("sums").keys() == {"1", "2"}
        assert set(map(str, state.values())) <= {"", "none", "0", "None", "{}"}
        assert file.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("stage", ["keys", "masked"])
def test_pairwise_round_is_repeated_without_a_missing_client(
    plain_bench: Workbench, pairwise_bench: Workbench, tmp_path: Path, stage: str
) -> None:
    folder = tmp_path / "pairwise"
    records: list[RoundRecord] = []
    federation = losing(pairwise_bench, folder, {1: {"0001": STAGES[stage]}})
    weights = train(pairwise_bench, federation, folder, records).state.weights
    plain, _ = _trained(plain_bench, tmp_path / "plain", {"0001": None})
    _require_close(weights, plain)
    assert [record["num_failed"] for record in records] == [1, 0]
    # 5 that train and 4 again, or 4 with keys; then 5 in the second round.
    assert federation.num_trainings == (14 if stage == "masked" else 9)


def test_both_protocols_yield_the_same_bits(
    secure_bench: Workbench, pairwise_bench: Workbench, tmp_path: Path
) -> None:
    first, _ = _trained(secure_bench, tmp_path / "secagg_plus")
    second, _ = _trained(pairwise_bench, tmp_path / "pairwise")
    assert torch.equal(first, second)


def test_update_leaves_only_masked(secure_bench: Workbench, tmp_path: Path) -> None:
    @dataclasses.dataclass
    class WithoutMasks(Federation):
        inner: Federation

        def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
            plain = (dataclasses.replace(each, masking=None) for each in requests)
            return self.inner.exchange(step, plain)

    inner = SerialFederation(runtime_of(secure_bench, tmp_path))
    with pytest.raises(TooManyFailuresError, match="no request to mask the update"):
        train(secure_bench, WithoutMasks(inner), tmp_path)


def test_keys_of_another_round_are_refused(
    secure_bench: Workbench, tmp_path: Path
) -> None:
    @dataclasses.dataclass
    class AnotherRound(Federation):
        inner: Federation

        def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
            if step.purpose is Purpose.TRAIN:
                step = step._replace(server_round=5)
            return self.inner.exchange(step, (replaced(each) for each in requests))

    def replaced(request: Request) -> Request:
        return dataclasses.replace(request, server_round=5 * bool(request.masking))

    inner = SerialFederation(runtime_of(secure_bench, tmp_path))
    with pytest.raises(TooManyFailuresError, match="expected those of round 5"):
        train(secure_bench, AnotherRound(inner), tmp_path)


def test_nothing_is_unmasked_after_more_failures_than_allowed(
    tmp_path: Path,
) -> None:
    bench = bench_of({"name": "secagg_plus"}, run={"max_failed_fraction": 0.1})
    with pytest.raises(TooManyFailuresError, match="nothing was learned"):
        _trained(bench, tmp_path, {"0001": None})
    for file in (tmp_path / CLIENTS / SECURE).iterdir():
        assert json.loads(file.read_text())["sums"] == {}


def test_update_of_too_large_numbers_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_of({"name": "secagg_plus", "clip_range": 1e-3})
    with pytest.raises(TooManyFailuresError, match=r"beyond 0\.001, expected none"):
        _trained(bench, tmp_path / "most")
    few = bench_of({"name": "secagg_plus", "clip_range": 0.04}, num_rounds=1)
    _trained(few, tmp_path / "few")
    assert "are clipped; consider a larger" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"num_examples": 0},
        {"weights": torch.zeros(3)},
        {"weights": torch.zeros(0)},
        {"weights": torch.zeros(1, 1)},
    ],
)
def test_client_with_an_invalid_update_is_left_out(
    plain_bench: Workbench,
    secure_bench: Workbench,
    tmp_path: Path,
    changes: Mapping[str, Any],
) -> None:
    """The first reply of the first round is invalid, and the others count."""

    @dataclasses.dataclass
    class Spoiling(Federation):
        inner: Federation
        spoiled_client: str = ""

        def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
            for reply in self.inner.exchange(step, requests):
                if step.purpose is Purpose.TRAIN and not self.spoiled_client:
                    self.spoiled_client = reply.client
                    record = dataclasses.replace(reply.record, **changes)
                    reply = dataclasses.replace(reply, record=record)
                yield reply

    inner = SerialFederation(runtime_of(secure_bench, tmp_path / "secure"))
    federation = Spoiling(inner)
    state = train(secure_bench, federation, tmp_path / "secure").state
    lost: Mapping[str, Stage] = {federation.spoiled_client: None}
    plain, _ = _trained(plain_bench, tmp_path / "plain", lost)
    _require_close(state.weights, plain)


def test_round_of_two_clients_is_refused(tmp_path: Path) -> None:
    bench = bench_of({"name": "secagg_plus"}, participation=0.4)
    with pytest.raises(
        RunError, match="found 2 clients in a round, expected 3 to 4096"
    ):
        _trained(bench, tmp_path)


def test_other_settings_give_no_sum(secure_bench: Workbench, tmp_path: Path) -> None:
    """Clients with other settings than the server derive other keys."""
    runtime = runtime_of(secure_bench, tmp_path)
    settings = runtime.secure_sums.settings
    assert settings is not None
    settings = dataclasses.replace(settings, bits=19)
    sums = dataclasses.replace(runtime.secure_sums, settings=settings)
    federation = LosingReplies(
        SerialFederation(dataclasses.replace(runtime, secure_sums=sums)),
        {1: {"0001": None}},
    )
    with pytest.raises(RunError, match="damaged"):
        train(secure_bench, federation, tmp_path)


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"method.name": "scaffold"}, ["SCAFFOLD"]),
        ({"method.name": "krum"}, ["Krum"]),
        ({"training.compression": {"name": "sign"}}, ["compression"]),
        ({"training.timing": {"name": "buffered"}}, ["timing"]),
        (
            {"method.name": "krum", "training.compression": {"name": "sign"}},
            ["Krum", "compression"],
        ),
        ({"training.secure_aggregation.threshold": 0.5}, ["threshold"]),
    ],
)
def test_conflicting_settings_are_refused(
    changes: Mapping[str, object], problems: list[str]
) -> None:
    training = {**DOCUMENT["training"], "secure_aggregation": {"name": "secagg_plus"}}
    document = {**DOCUMENT, "training": training}
    overrides = [f"{key}={value}" for key, value in changes.items()]
    with pytest.raises(ConfigError) as raised:
        load_experiment(document, experiment_catalogue(), overrides)
    assert len(raised.value.problems) == len(problems)
    for problem, expected in zip(raised.value.problems, problems, strict=True):
        assert expected in str(problem)


def test_documents_without_secure_aggregation_do_not_name_it() -> None:
    experiment = load_experiment(DOCUMENT, experiment_catalogue())
    assert "secure_aggregation" not in to_document(experiment)["training"]


@pytest.mark.parametrize(
    "privacy",
    [
        {"noise_shares": 5, "noise_multiplier": 0.1},
        {"noise_multiplier": 0.1},
        {"noise_multiplier": 0},
    ],
)
def test_secure_sum_with_noise_is_the_plain_one(
    privacy: Mapping[str, object], tmp_path: Path
) -> None:
    chosen = {"clip_norm": 0.5, **privacy}
    secure = bench_of({"name": "secagg_plus"}, privacy=chosen)
    plain = bench_of(None, privacy=chosen)
    weights, _ = _trained(secure, tmp_path / "secure", {"0001": None})
    expected, _ = _trained(plain, tmp_path / "plain", {"0001": None})
    _require_close(weights, expected)


@dataclasses.dataclass
class KilledServer(LosingReplies):
    """A server of real clients that is killed after the first reply of a stage."""

    stage: Stage = None

    def __post_init__(self) -> None:
        self.trusts_clients = False

    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        requests = list(requests)
        for reply in super().exchange(step, requests):
            yield reply
            message = getattr(requests[0].payload, "message", None)
            if type(message) is self.stage:
                raise KeyboardInterrupt


@pytest.mark.parametrize(("stage", "num_noted"), [(RoundPlan, 0), (UnmaskRequest, 1)])
def test_release_is_noted_before_the_sum_is_unmasked(
    tmp_path: Path, stage: Stage, num_noted: int
) -> None:
    privacy = {
        "clip_norm": 1.0,
        "noise_multiplier": 0.1,
        "noise_shares": 5,
    }
    bench = bench_of({"name": "secagg_plus"}, privacy)
    serial = SerialFederation(runtime_of(bench, tmp_path))
    with pytest.raises(KeyboardInterrupt):
        train(bench, KilledServer(serial, {}, stage=stage), tmp_path)
    releases = tmp_path / "checkpoints/releases.jsonl"
    noted = releases.read_text().splitlines() if releases.exists() else []
    assert len(noted) == num_noted
