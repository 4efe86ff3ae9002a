"""Private rounds: noise, clipping, sampling, budget, and what is accounted for."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from safetensors.torch import load_file
from scipy import stats
from scipy.linalg import toeplitz
from torch import Tensor

from knnper.errors import ConfigError, RunError
from knnper.experiment import Experiment, RunSettings, TrainingSettings
from knnper.experiment_file import (
    load_experiment,
    relevant_settings,
    results_identity,
    to_document,
)
from knnper.privacy import seeded_noise, system_noise
from knnper.privacy_settings import (
    PrivacySettings,
    SecAggPlusSettings,
)
from knnper.records import fingerprint
from knnper.seeding import RandomKey
from knnper.server import private_training
from knnper.server.checkpoints import Checkpoint, CheckpointFolder
from knnper.server.correlated_noise import CorrelatedNoise, coefficients
from knnper.server.federation import Reply
from knnper.server.observer import Observer, RoundRecord, round_figures
from knnper.server.private_training import (
    PrivateRound,
    PrivateTraining,
)
from knnper.server.roster import Member, Roster
from knnper.server.rounds import RoundLoop
from knnper.server.run_folder import RunFolder
from knnper.server.selection import InTurn, Poisson, Uniform
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.workbench import open_workbench
from knnper.strategies.core.assembly import Assembly
from knnper.strategies.core.mean_update import differences
from knnper.strategies.core.private_updates import (
    client_deviation,
    private_update,
    private_updates,
)
from knnper.strategies.core.records import ModelPayload, ModelState, ModelUpdate
from knnper.strategies.fedavg import FedAvg
from tests.server.test_rounds import Functions
from tests.strategies.tiny import linear_task, noisy, normed_task

NUM_PIXELS = 10_000  # so 20,000 weights
NAMES = tuple("abcdefgh")
Answer = Callable[[str, ModelPayload, int], Reply]


def assembly_of(
    privacy: PrivacySettings, num_pixels: int = 1, seed: int = 0, **training: Any
) -> Assembly:
    """Return FedAvg on a linear model of two classes, all weights 0."""
    task = linear_task(TrainingSettings(**training), num_pixels)
    anything: Any = SimpleNamespace(name="none", settings=None)
    experiment = Experiment(
        "test",
        anything,
        anything,
        anything,
        task.training,
        anything,
        anything,
        RunSettings(seed=seed),
        privacy=privacy,
    )
    method = FedAvg(task, FedAvg.settings_type())
    return Assembly(experiment, RandomKey(seed), task, method)


def training_of(privacy: PrivacySettings, num_clients: int, **more: Any) -> Any:
    return PrivateTraining(assembly_of(privacy, **more), num_clients)


def train(
    folder: Path,
    answer: Answer,
    privacy: PrivacySettings,
    *,
    is_real: bool = False,
    attempts: int = 1,
    run: Mapping[str, Any] | None = None,
    **more: Any,
) -> tuple[Checkpoint, list[RoundRecord]]:
    """Train clients that are one function, each with ten examples."""
    assembly = assembly_of(privacy, **more)
    settings = RunSettings(**(run or {}))
    assembly = replace(assembly, experiment=replace(assembly.experiment, run=settings))
    federation = Functions(answer)
    federation.trusts_clients = not is_real
    federation.round_attempts = attempts
    roster = Roster.of([Member(name, True, 10, 10, 0) for name in NAMES], "")
    checkpoints = CheckpointFolder(folder, "test")
    records: list[RoundRecord] = []
    state = assembly.method.init(NAMES, RandomKey(0))
    start = checkpoints.load_latest(ModelState)
    start = start or Checkpoint(0, state, fingerprint(state))
    loop = RoundLoop(assembly, federation, roster, checkpoints, records.append)
    return loop.train(start), records


def moves(by: Mapping[str, Sequence[float]]) -> Answer:
    """Return clients that move the two weights; those not listed fail."""

    def answer(client: str, payload: ModelPayload, _: int) -> Reply:
        if client not in by:
            return Reply((client,), None, "asleep")
        weights = payload.weights + torch.tensor(by[client])
        return Reply((client,), ModelUpdate(weights, 10, 0.5))

    return answer


def weights_of(trained: Checkpoint) -> list[float]:
    values: list[float] = trained.state.weights.tolist()
    return values


def test_noise_is_gaussian_of_the_stated_deviation() -> None:
    """σ S / (q N) in each coordinate, independent of the round before."""
    privacy = PrivacySettings(clip_norm=2.0, noise_multiplier=3.0)
    training = training_of(
        privacy, num_clients=40, num_pixels=NUM_PIXELS, participation=0.5
    )
    state = training.method.init((), RandomKey(0))
    payload = ModelPayload(state.weights)
    samples = []
    for server_round in (1, 2):
        private = PrivateRound(training, payload, server_round, 2.0)
        update = ModelUpdate(payload.weights.clone(), 1, 0.0)
        ((_, mean),) = private.noisy_mean([("a", update), ("b", update)])
        samples.append((mean.weights - payload.weights).double().numpy())
    deviation = 3.0 * 2.0 / 20
    count = 2 * NUM_PIXELS
    for sample in samples:
        assert abs(sample.mean()) < 5 * deviation / count**0.5
        assert sample.std() == pytest.approx(deviation, rel=5 / (2 * count) ** 0.5)
        # The bound has probability 1e-6; the seed is fixed, so that it holds or not.
        test = stats.kstest(sample, stats.norm(0, deviation).cdf)
        assert test.pvalue > 1e-6
    assert abs(np.corrcoef(*samples)[0, 1]) < 5 / count**0.5


def test_real_clients_get_noise_that_no_seed_repeats() -> None:
    draws = [
        source(RandomKey(1, ("noise",))).normal(size=3).tolist()
        for source in (seeded_noise, seeded_noise, system_noise, system_noise)
    ]
    assert draws[0] == draws[1]
    assert draws[2] != draws[3]
    assert draws[2] != draws[0]


def test_long_updates_are_clipped_and_short_ones_untouched() -> None:
    method = FedAvg(linear_task(), FedAvg.settings_type())
    payload = ModelPayload(torch.tensor([1.0, -1.0]))
    long = ModelUpdate(payload.weights + torch.tensor([3.0, 4.0]), 7, 0.5)
    generator = RandomKey(3).numpy()
    short = private_update(method, payload, long, 1.0, generator, 0.0)
    assert short.weights.tolist() == pytest.approx([1.6, -0.2])
    assert (short.num_examples, short.train_loss) == (7, 0.5)
    for limit in (5.0, 6.0):
        same = private_update(method, payload, long, limit, generator, 0.0)
        assert same is long
    for _ in range(50):
        change = torch.from_numpy(generator.normal(size=2).astype(np.float32))
        update = ModelUpdate(payload.weights + change, 1, 0.0)
        limit = float(generator.uniform(0.1, 2))
        result = private_update(method, payload, update, limit, generator, 0.0)
        assert differences(method, payload, result).norm() <= limit * (1 + 1e-5)


def test_clients_clip_and_add_their_share_of_the_noise() -> None:
    task = linear_task(TrainingSettings(learning_rate=100.0), num_pixels=400)
    method = FedAvg(task, FedAvg.settings_type())
    privacy = PrivacySettings(clip_norm=0.5, noise_multiplier=4.0, noise_shares=25)
    private = private_updates(task, method, privacy)
    assert client_deviation(privacy) == 4.0 * 0.5 / 5
    exact = replace(privacy, noise_multiplier=0.0)
    clipping = private_updates(task, method, exact)
    data = noisy(12, 0, seed=1)
    image = torch.randint(0, 256, (12, 1, 400, 1), dtype=torch.uint8)
    data = replace(data, train=replace(data.train, images=image))
    data = replace(data, train=replace(data.train, labels=data.train.labels % 2))
    payload = method.broadcast(method.init((), RandomKey(0)), "a", RandomKey(0))

    def update(of: Any, client: str) -> Tensor:
        key = RandomKey(5).child(client)
        sent: ModelUpdate = of.client_update(payload, None, data, 1, key)[1]
        change: Tensor = sent.weights - payload.weights
        return change

    assert update(method, "a").norm() > 0.5
    assert float(update(clipping, "a").norm()) == pytest.approx(0.5, rel=1e-5)
    noise = update(private, "a") - update(clipping, "a")
    assert float(noise.std()) == pytest.approx(0.4, rel=0.1)
    assert not torch.equal(noise, update(private, "b") - update(clipping, "b"))


def test_poisson_samples_include_each_client_independently() -> None:
    clients = [f"{number:03}" for number in range(200)]
    selection = Poisson(RandomKey(7), 0.3)
    rounds = [set(selection.draw(clients, 60, number)) for number in range(1, 1001)]
    assert rounds[4] == set(selection.draw(clients, 1, 5))
    sizes = np.array([len(chosen) for chosen in rounds])
    assert abs(sizes.mean() - 60) < 5 * (42 / 1000) ** 0.5
    assert sizes.var() == pytest.approx(42, rel=5 * (2 / 1000) ** 0.5)
    together = np.array([{"000", "001"} <= chosen for chosen in rounds]).mean()
    assert together == pytest.approx(0.09, abs=5 * (0.09 * 0.91 / 1000) ** 0.5)
    for client in clients:
        rate = np.array([client in chosen for chosen in rounds]).mean()
        assert rate == pytest.approx(0.3, abs=5 * (0.21 / 1000) ** 0.5)


def test_sum_is_of_clipped_updates_over_a_fixed_number(tmp_path: Path) -> None:
    """With next to no noise: (3, 4) / 5 and (0, 0.5) over the expected 8 clients."""
    privacy = PrivacySettings(clip_norm=1.0, noise_multiplier=1e-9)
    answer = moves(
        {
            "a": (3, 4),
            "b": (0, 0.5),
            "d": (-1e6, 0),
            "e": (3e38, -3e38),  # a norm that overflows is a failure
            "f": (math.inf, 0),
        }
    )
    run = {"max_failed_fraction": 0.7}
    trained, records = train(tmp_path, answer, privacy, num_rounds=1, run=run)
    assert weights_of(trained) == pytest.approx([(0.6 - 1) / 8, 1.3 / 8], abs=1e-7)
    assert records[0]["num_failed"] == 5
    # One client, however far it moves, changes the sum by the clip norm at most.
    assert "clipped" not in records[0]


def test_no_client_changes_what_happens_to_another(tmp_path: Path) -> None:
    """Without privacy d would be refused as an outlier; here it is clipped."""
    privacy = PrivacySettings(clip_norm=1.0, noise_multiplier=1e-9)
    still = dict.fromkeys(NAMES, (0.0, 0.0))
    trained, _ = train(
        tmp_path, moves(still | {"d": (1e3, 0.0)}), privacy, num_rounds=1
    )
    assert weights_of(trained) == pytest.approx([1 / 8, 0], abs=1e-7)


def test_epsilon_of_each_round_is_that_of_the_package(tmp_path: Path) -> None:
    privacy = PrivacySettings(clip_norm=1.0, noise_multiplier=1.2, delta=1e-3)
    everyone = moves(dict.fromkeys(NAMES, (0.1, 0.0)))
    _, records = train(
        tmp_path, everyone, privacy, num_rounds=3, participation=0.5, seed=3
    )
    counter = PLDAccountant(value_discretization_interval=1e-3)
    event = dp_accounting.GaussianDpEvent(1.2)
    for record in records:
        counter.compose(dp_accounting.PoissonSampledDpEvent(0.5, event))
        assert record["epsilon"] == pytest.approx(counter.get_epsilon(1e-3), rel=1e-3)
        assert record["num_releases"] == record["server_round"]
        assert f"epsilon {record['epsilon']:.3g}" in round_figures(
            {**record, "train_loss": 0.5}
        )


def test_all_clients_without_sampling_amplify_nothing(tmp_path: Path) -> None:
    privacy = PrivacySettings(clip_norm=1.0, noise_multiplier=2.0, delta=1e-3)
    everyone = moves(dict.fromkeys(NAMES, (0.1, 0.0)))
    _, records = train(tmp_path, everyone, privacy, num_rounds=2)
    assert [record["num_clients"] for record in records] == [8, 8]
    counter = PLDAccountant()
    counter.compose(dp_accounting.GaussianDpEvent(2.0), 2)
    assert records[1]["epsilon"] == pytest.approx(counter.get_epsilon(1e-3), rel=1e-3)


def test_run_stops_before_the_round_beyond_its_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    privacy = PrivacySettings(
        clip_norm=1.0, noise_multiplier=2.0, epsilon=3.0, delta=1e-3
    )
    everyone = moves(dict.fromkeys(NAMES, (0.1, 0.0)))
    run = {"checkpoint_every": 4}
    trained, records = train(tmp_path, everyone, privacy, num_rounds=9, run=run)
    training = training_of(privacy, 8, num_rounds=9)
    num_rounds = len(records)
    assert (
        training.epsilon_after(num_rounds)
        <= 3.0
        < training.epsilon_after(num_rounds + 1)
    )
    assert records[-1]["epsilon"] == training.epsilon_after(num_rounds)
    assert trained.server_round == num_rounds < 9
    assert "the training ends at its budget: privacy.epsilon: found 3" in caplog.text
    assert f"for round {num_rounds + 1}" in caplog.text
    small = replace(privacy, epsilon=0.1)
    with pytest.raises(
        RunError, match=r"found 0\.1, .* at least 1.*for round 1; raise"
    ):
        train(tmp_path / "small", everyone, small, num_rounds=9)
    # Resumed, it makes no further round.
    again, more = train(tmp_path, everyone, privacy, num_rounds=9, run=run)
    assert (again.fingerprint, more) == (trained.fingerprint, [])


@pytest.mark.parametrize("noise_at", ["server", "clients"])
def test_noise_from_epsilon_lasts_for_all_rounds(noise_at: Any) -> None:
    privacy = PrivacySettings(clip_norm=1.0, epsilon=2.0)
    training = training_of(privacy, 100, num_rounds=30, participation=0.2)
    assert training.delta == 100**-1.1
    assert isinstance(training.selection, Poisson)
    assert 1.98 < training.epsilon_after(30) <= 2.0
    secure = training_of(
        privacy, 100, participation=0.2, secure_aggregation=SecAggPlusSettings()
    )
    assert (type(secure.selection), secure.release.sampling) == (Uniform, 1.0)
    assert secure.num_expected == 20
    if noise_at == "clients":
        # 20 of 100 clients, of which 10 may fail: noise of 10 shares of 20.
        privacy = PrivacySettings(clip_norm=1.0, noise_multiplier=4.0, noise_shares=20)
        training = training_of(privacy, 100, num_rounds=30, participation=0.2)
        assert training.release.noise_multiplier == pytest.approx(4 / 2**0.5)
        assert training.release.sampling == 1.0
        assert (type(training.selection), training.sum_noise) == (Uniform, 0.0)


def test_round_without_clients_is_noise_alone(tmp_path: Path) -> None:
    privacy = PrivacySettings(clip_norm=1.0, noise_multiplier=2.0)
    everyone = moves(dict.fromkeys(NAMES, (0.1, 0.0)))
    trained, records = train(
        tmp_path, everyone, privacy, num_rounds=4, participation=0.01, seed=2
    )
    assert [record["num_clients"] for record in records] == [0] * 4
    assert all(math.isnan(record["train_loss"]) for record in records)
    key = RandomKey(2)
    noise = np.zeros(2)
    for number in range(1, 5):
        noise += key.child("privacy noise", number).numpy().normal(0, 2, 2)
    assert weights_of(trained) == pytest.approx((noise / 0.08).tolist(), rel=1e-5)


def test_adaptive_clip_norm_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of eight are not clipped: C becomes C exp(-0.2 (6/8 - 1/2))."""
    monkeypatch.setattr(private_training, "_COUNT_NOISE", 1e-7)
    privacy = PrivacySettings(clip_norm=2.0, noise_multiplier=1e-9, adaptive=True)
    by = dict.fromkeys(NAMES, (1.0, 0.0)) | {"a": (4.0, 3.0), "b": (0.0, 9.0)}
    trained, records = train(tmp_path, moves(by), privacy, num_rounds=2)
    second = 2 * math.exp(-0.2 * (6 / 8 - 1 / 2))
    assert [record["clip_norm"] for record in records] == pytest.approx([2, second])
    first = torch.tensor([6 + 1.6, 1.2 + 2]) / 8
    last = torch.tensor([6 + 0.8 * second, 0.6 * second + second]) / 8
    assert weights_of(trained) == pytest.approx((first + last).tolist(), rel=1e-5)
    assert trained.history.clip_norm == pytest.approx(
        second * math.exp(-0.2 * (6 / 8 - 1 / 2))
    )


def test_adaptive_clipping_splits_the_noise() -> None:
    """z^-2 = z_Δ^-2 + (2 σ_b)^-2: sum and count together cost as much as z."""
    privacy = PrivacySettings(clip_norm=1.0, noise_multiplier=1.5, adaptive=True)
    training = training_of(privacy, 200)
    assert training.count_noise == 10.0
    assert training.sum_noise**-2 + 20.0**-2 == pytest.approx(1.5**-2)
    assert training.sum_noise > 1.5
    # A few clients: at least the multiplier, so that the sum's noise stays finite.
    few = training_of(privacy, 4)
    assert few.count_noise == 1.5
    assert few.sum_noise == pytest.approx(1.5 / 0.75**0.5)


def test_repeated_round_counts_only_what_it_released(tmp_path: Path) -> None:
    """Round 2 fails at first, and releases nothing then."""
    privacy = PrivacySettings(clip_norm=1.0, noise_multiplier=2.0)
    everyone = moves(dict.fromkeys(NAMES, (0.1, 0.0)))
    num_asked = 0

    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        nonlocal num_asked
        num_asked += server_round == 2
        if server_round == 2 and num_asked <= 8:
            return Reply((client,), None, "asleep")
        return everyone(client, payload, server_round)

    _, records = train(
        tmp_path, answer, privacy, is_real=True, attempts=2, num_rounds=3
    )
    assert num_asked == 16
    assert [record["num_releases"] for record in records] == [1, 2, 3]
    lines = (tmp_path / "releases.jsonl").read_text().splitlines()
    assert [json.loads(line)["server_round"] for line in lines] == [1, 2, 3]


def test_resumed_run_counts_the_rounds_that_it_repeats(tmp_path: Path) -> None:
    """Killed in round 4 with a checkpoint of round 2: round 3 is released twice.

    With real clients these are two releases with noise of their own; a simulation
    releases the same numbers again.
    """
    privacy = PrivacySettings(clip_norm=1.0, noise_multiplier=2.0)
    everyone = moves(dict.fromkeys(NAMES, (0.1, 0.0)))

    def killed(client: str, payload: ModelPayload, server_round: int) -> Reply:
        if server_round == 4:
            raise KeyboardInterrupt
        return everyone(client, payload, server_round)

    releases: dict[bool, list[Any]] = {}
    for is_real in (True, False):
        folder, run = tmp_path / str(is_real), {"checkpoint_every": 2}
        more: dict[str, Any] = {"is_real": is_real, "run": run, "num_rounds": 4}
        with pytest.raises(KeyboardInterrupt):
            train(folder, killed, privacy, **more)
        resumed, records = train(folder, everyone, privacy, **more)
        assert [record["server_round"] for record in records] == [3, 4]
        releases[is_real] = [record["num_releases"] for record in records]
        whole, _ = train(folder / "whole", everyone, privacy, **more)
        assert (whole.fingerprint == resumed.fingerprint) is not is_real
    assert releases == {True: [4, 5], False: [3, 4]}


def document(**sections: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 8},
        "model": {"name": "mlp", "hidden_sizes": [4]},
        "method": {"name": "fedavg"},
        "training": {"num_rounds": 2, "participation": 0.5, "batch_size": 16},
        "run": {"engine": "serial"},
        **sections,
    }


def run(folder: Path, **sections: Any) -> dict[str, Any]:
    experiment = load_experiment(document(**sections), experiment_catalogue())
    bench = open_workbench(experiment)
    created = RunFolder.create(folder, experiment)
    return dict(simulate(bench, created, Observer(), []))


def equal_clients(folder: Path) -> dict[str, Any]:
    """Return an experiment on a table with equally many rows for each client."""
    generator = RandomKey(4).numpy()
    rows = ["client,a,b,label"]
    for client in range(6):
        for _ in range(40):
            a, b = generator.normal(size=2)
            rows.append(f"{client},{a:.4f},{b:.4f},{int(a + b > 0)}")
    path = folder / "rows.csv"
    path.write_text("\n".join(rows) + "\n")
    return {
        "data": {
            "name": "table",
            "train": str(path),
            "label": "label",
            "client": "client",
        },
        "partition": {"name": "natural"},
    }


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "fedrep"])
def test_zero_noise_is_the_plain_run_bit_for_bit(tmp_path: Path, method: str) -> None:
    """Clients of one size, and a clip norm that none reaches: the same model."""
    sections = {**equal_clients(tmp_path), "method": {"name": method}}
    plain = run(tmp_path / "plain", **sections)
    private = run(
        tmp_path / "private",
        **sections,
        privacy={"clip_norm": 1e9, "noise_multiplier": 0},
    )
    digest = plain["training"]["state_sha256"]
    assert private["training"]["state_sha256"] == digest
    assert "privacy" not in private["manifest"]
    assert "epsilon" not in private["training"]
    clip = {"clip_norm": 1e-3, "noise_multiplier": 0}
    short = run(tmp_path / "short", **sections, privacy=clip)
    assert short["training"]["state_sha256"] != digest


@pytest.mark.parametrize(("delta", "num_warnings"), [(None, 1), (1e-5, 0)])
def test_large_delta_is_warned_of(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    delta: float | None,
    num_warnings: int,
) -> None:
    """Of 8 clients the default is 8^-1.1 = 0.10."""
    privacy = {"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": delta}
    run(tmp_path, privacy=privacy)
    warnings = [text for text in caplog.messages if "set privacy.delta" in text]
    assert len(warnings) == num_warnings


def test_results_and_manifest_state_the_privacy(tmp_path: Path) -> None:
    results = run(
        tmp_path / "run",
        method={"name": "knn_per"},
        privacy={"clip_norm": 0.5, "noise_multiplier": 1.0, "accountant": "rdp"},
    )
    training = results["training"]
    records = RunFolder.open(tmp_path / "run").rounds()
    last = {"epsilon": records[-1]["epsilon"], "delta": 8**-1.1, "num_releases": 2}
    assert {key: training[key] for key in last} == last
    expected = {
        "unit": "client",
        "delta": 8**-1.1,
        "noise_multiplier": 1.0,
        "sampling_probability": 0.5,
    }
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    plan = manifest["privacy"]
    assert {key: plan[key] for key in expected} == expected
    assert plan["epsilon"] == pytest.approx(training["epsilon"])
    assert any("λ" in quantity for quantity in plan["also_released"])
    assert results["manifest"]["privacy"] == plan


def problems_of(**sections: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_experiment(document(**sections), experiment_catalogue())
    return {problem.place: problem.message for problem in caught.value.problems}


def test_all_conflicts_of_privacy_are_listed_at_once() -> None:
    problems = problems_of(
        method={"name": "krum"},
        training={"timing": {"name": "buffered"}},
        privacy={"clip_norm": 1.0},
    )
    expected = {"method.name", "training.timing", "privacy.noise_multiplier"}
    assert set(problems) == expected
    problems = problems_of(
        training={"devices": {}},
        privacy={"clip_norm": 1.0, "noise_multiplier": 1},
    )
    assert set(problems) == {"training"}
    problems = problems_of(
        training={"selection": {"name": "utility"}},
        privacy={"clip_norm": 1.0, "noise_shares": 3, "adaptive": True, "epsilon": 1},
    )
    assert set(problems) == {
        "training",
        "privacy.noise_multiplier",
        "privacy",
    }
    exact = {"clip_norm": 1.0, "noise_multiplier": 0, "adaptive": True, "epsilon": 1}
    for needs_noise in ("adaptive", "epsilon"):
        without = {key: exact[key] for key in exact if key != needs_noise}
        assert set(problems_of(privacy=without)) == {"privacy.noise_multiplier"}
    problems = problems_of(
        training={"timing": {"name": "synchronous", "over_selection": 1.3}},
        privacy={"clip_norm": 1.0, "noise_multiplier": 1},
    )
    assert set(problems) == {"training.timing"}
    problems = problems_of(
        privacy={
            "clip_norm": 0,
            "noise_multiplier": -1,
            "noise_shares": 0,
            "delta": 1.0,
            "sigma": 2,
        }
    )
    assert set(problems) == {
        "privacy.clip_norm",
        "privacy.noise_shares",
        "privacy.noise_multiplier",
        "privacy.delta",
        "privacy.sigma",
    }
    turns: dict[str, Any] = {
        "clip_norm": 1.0,
        "noise_multiplier": 1,
        "correlated": True,
    }
    for name, value in (("adaptive", True), ("noise_shares", 4)):
        assert set(problems_of(privacy=turns | {name: value})) == {"privacy"}


def test_model_with_running_statistics_is_refused() -> None:
    privacy = PrivacySettings(clip_norm=1.0, noise_multiplier=1.0)
    task = normed_task()
    method = FedAvg(task, FedAvg.settings_type())
    with pytest.raises(ConfigError, match="found a model with running statistics"):
        private_updates(task, method, privacy)


def test_section_is_part_of_the_identity_and_absent_without_privacy() -> None:
    catalogue = experiment_catalogue()
    plain = load_experiment(document(), catalogue)
    assert "privacy" not in to_document(plain)
    assert "privacy" not in relevant_settings(plain)
    section = {"clip_norm": 1.0, "noise_multiplier": 1.0}
    private = load_experiment(document(privacy=section), catalogue)
    assert load_experiment(to_document(private), catalogue) == private
    assert results_identity(private) != results_identity(plain)
    assert load_experiment(document(privacy=None), catalogue) == plain


def test_too_little_noise_for_any_epsilon_is_refused() -> None:
    with pytest.raises(RunError, match="found no noise for epsilon"):
        training_of(PrivacySettings(clip_norm=1.0, epsilon=1e-12, delta=1e-30), 10)


def test_sum_of_masked_updates_gets_the_same_noise(tmp_path: Path) -> None:
    """With secure aggregation of 24 bits it is the run without, up to rounding."""
    sections = equal_clients(tmp_path) | {"model": {"name": "mlp", "hidden_sizes": [3]}}
    privacy = {"clip_norm": 0.05, "noise_multiplier": 0.5}
    training = {"num_rounds": 2, "batch_size": 16, "learning_rate": 0.5}
    masked = {"name": "secagg_plus", "clip_range": 0.1, "bits": 24}
    states: dict[str, list[Tensor]] = {}
    for noise_at in ("server", "clients"):
        shares = {"noise_shares": 6}
        section = privacy | (shares if noise_at == "clients" else {})
        for name, secure in (("plain", None), ("masked", masked)):
            folder = tmp_path / f"{noise_at}-{name}"
            chosen = training | ({"secure_aggregation": secure} if secure else {})
            run(folder, **sections, training=chosen, privacy=section)
            path = folder / "checkpoints/round-000002/state.safetensors"
            (tensor,) = load_file(path).values()
            states.setdefault(noise_at, []).append(tensor)
    for plain, other in states.values():
        assert torch.allclose(plain, other, atol=1e-5)
        assert not torch.equal(plain, other)
    server, clients = (plain for plain, _ in states.values())
    assert not torch.allclose(server, clients, atol=1e-3)


def test_correlated_noise_is_solved_from_independent_noise() -> None:
    """C y = z for the lower triangular Toeplitz matrix of 1, 1/2, 3/8."""
    assert coefficients(4).tolist() == [1, 1 / 2, 3 / 8, 5 / 16]
    rows = RandomKey(1).numpy().normal(size=(7, 5))
    matrix = toeplitz([1, 1 / 2, 3 / 8, 0, 0, 0, 0], np.zeros(7))
    noise = CorrelatedNoise(3)
    made = [noise.row(n, lambda m: rows[m - 1]) for n in range(1, 8)]
    np.testing.assert_allclose(matrix @ np.array(made), rows, atol=1e-12)
    # From the middle: the same in a simulation, another matrix otherwise.
    again = CorrelatedNoise(3)
    assert np.array_equal(again.row(5, lambda m: rows[m - 1]), made[4])
    assert np.array_equal(again.row(5, lambda m: rows[m - 1]), made[4])
    fresh = CorrelatedNoise(3, num_rows=4)
    assert np.array_equal(fresh.row(5, lambda m: rows[m - 1]), rows[4])
    sixth = fresh.row(6, lambda m: rows[m - 1])
    np.testing.assert_allclose(sixth, rows[5] - rows[4] / 2)


def test_one_client_changes_the_correlated_releases_by_what_is_accounted() -> None:
    """The largest change of C G over all clients' turns, by brute force."""
    num_rounds, band = 11, 4
    matrix = toeplitz(np.pad(coefficients(band), (0, num_rounds - band)), [0.0] * 11)
    norms = []
    for first in range(band):
        turns = matrix[:, first::band]  # the same direction in all rounds is worst
        norms.append(np.linalg.norm(turns.sum(axis=1)))
    most = np.linalg.norm(coefficients(band)) * math.ceil(num_rounds / band) ** 0.5
    assert 0.8 * most < max(norms) <= most + 1e-9
    privacy = PrivacySettings(
        clip_norm=2.0, noise_multiplier=1.5, correlated=True, delta=1e-3
    )
    training = training_of(privacy, 20, num_rounds=11, participation=0.25)
    assert isinstance(training.selection, InTurn)
    assert (training.num_groups, training.num_expected) == (4, 5.0)
    assert training.sum_noise == pytest.approx(1.5 * np.linalg.norm(coefficients(4)))
    counter = PLDAccountant()
    counter.compose(dp_accounting.GaussianDpEvent(1.5), 3)
    assert training.epsilon_after(11) == pytest.approx(
        counter.get_epsilon(1e-3), rel=1e-3
    )
    assert (
        training.epsilon_after(8)
        == training.epsilon_after(5)
        < training.epsilon_after(9)
    )


@pytest.mark.parametrize("is_real", [True, False])
def test_clients_of_correlated_rounds_take_turns(tmp_path: Path, is_real: bool) -> None:
    """Killed in round 4 after a checkpoint of round 2: the turns go on."""
    privacy = PrivacySettings(clip_norm=1.0, noise_multiplier=2.0, correlated=True)
    everyone = moves(dict.fromkeys(NAMES, (0.1, 0.0)))
    asked: list[str] = []

    def noted(client: str, payload: ModelPayload, server_round: int) -> Reply:
        asked.append(client)
        return everyone(client, payload, server_round)

    def killed(client: str, payload: ModelPayload, server_round: int) -> Reply:
        if server_round == 4:
            raise KeyboardInterrupt
        return noted(client, payload, server_round)

    more: dict[str, Any] = {"is_real": is_real, "num_rounds": 6, "participation": 0.25}
    run = {"checkpoint_every": 2}
    whole, _ = train(tmp_path / "whole", noted, privacy, run=run, **more)
    groups = [{*asked[at : at + 2]} for at in range(0, 12, 2)]
    assert set.union(*groups[:4]) == {*NAMES}
    assert groups[4:] == groups[:2]
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", killed, privacy, run=run, **more)
    resumed, records = train(tmp_path / "cut", noted, privacy, run=run, **more)
    groups = [{*asked[at : at + 2]} for at in range(0, len(asked), 2)]
    if is_real:  # round 3 is released twice, to two groups
        assert [record["num_releases"] for record in records] == [4, 5, 6, 7]
        assert set.union(*groups[:4]) == {*NAMES}
        assert groups[4:] == groups[:3]
    else:
        assert resumed.fingerprint == whole.fingerprint


@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_all_clients_count_alike(tmp_path: Path, noise: float) -> None:
    privacy = PrivacySettings(clip_norm=9.0, noise_multiplier=noise)

    def answer(client: str, payload: ModelPayload, _: int) -> Reply:
        number = NAMES.index(client) + 1
        update = ModelUpdate(payload.weights + number, 10 * number, 0.5)
        return Reply((client,), update)

    trained, _ = train(tmp_path, answer, privacy, num_rounds=1)
    last = 2 * 9 / 2**0.5 if noise else 7 + 8  # clipped by the server with noise
    expected = (1 + 2 + 3 + 4 + 5 + 6) + last
    assert weights_of(trained) == pytest.approx([expected / 8] * 2, abs=1e-6)
