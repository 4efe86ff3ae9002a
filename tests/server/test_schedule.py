"""Who takes part when: by hand, against what must hold, and in whole runs."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.client.runtime import ClientRuntime, TrainingRequest
from knnper.data.examples import ClientData, Examples, no_examples
from knnper.errors import ConfigError, RunError
from knnper.experiment import (
    BufferedTiming,
    DeviceSettings,
    SynchronousTiming,
    TrainingSettings,
)
from knnper.experiment_file import load_experiment
from knnper.records import take_apart
from knnper.seeding import RandomKey
from knnper.server.checkpoints import rounds_in
from knnper.server.fleet import Devices
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.server.schedule import (
    RoundSchedule,
    Schedule,
    num_participants,
    rebased,
    schedule_of,
    staleness_factor,
)
from knnper.server.selection import Uniform
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.reports.client_table import read_clients
from knnper.simulation.workbench import open_workbench
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.compression import Compressed
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.strategies.fedavg import FedAvg
from tests.strategies.method_checks import document
from tests.strategies.test_contract import CLIENTS, TRAINING, build, client_update
from tests.strategies.tiny import (
    WITHOUT_BATCH_NORM,
    linear_task,
    noisy,
    normed_task,
    task_for,
)

MANY = [f"{i:04d}" for i in range(40)]
KEY = RandomKey(0)
# Of one model of eight numbers.
METHOD: Any = SimpleNamespace(
    num_weights=lambda _: 8, work=lambda _: 1.0, bytes_up=lambda _: 8
)
SIZES = {"a": 1, "b": 2, "c": 4}
ALIKE = DeviceSettings(examples_per_s=1)


@pytest.mark.parametrize(
    ("num_clients", "participation", "expected"),
    [(80, 0.2, 16), (10, 1.0, 10), (10, 0.25, 3), (10, 0.24, 2), (3, 0.01, 1)],
)
def test_the_nearest_number_takes_part(
    num_clients: int, participation: float, expected: int
) -> None:
    assert num_participants(num_clients, participation) == expected


def drawn(number: int, seed: int = 0, participation: float = 0.3) -> list[str]:
    cohort = RoundSchedule(MANY, participation, Uniform(RandomKey(seed))).cohort(number)
    assert set(cohort.versions.values()) == {number - 1}
    assert cohort.ended_s is None
    return list(cohort.versions)


@given(st.integers(0, 9), st.integers(1, 99))
def test_participants_are_distinct_sorted_and_repeatable(
    seed: int, number: int
) -> None:
    chosen = drawn(number, seed)
    assert len(chosen) == len(set(chosen)) == 12
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(MANY)
    assert chosen == drawn(number, seed)


def test_every_client_takes_its_turn() -> None:
    met = {name for number in range(1, 40) for name in drawn(number, 0, 0.2)}
    assert met == set(MANY)


def test_rounds_and_seeds_differ() -> None:
    numbers = itertools.product(range(1, 11), range(3))
    assert len({tuple(drawn(number, seed)) for number, seed in numbers}) == 30


def schedule(
    timing: SynchronousTiming | BufferedTiming,
    participation: float = 1.0,
    devices: DeviceSettings = ALIKE,
    sizes: Mapping[str, int] = SIZES,
    key: RandomKey = KEY,
) -> Schedule:
    training = TrainingSettings(
        participation=participation, devices=devices, timing=timing
    )
    return schedule_of(training, sizes, METHOD, key)


def steps(planned: Schedule, count: int) -> list[tuple[dict[str, int], float | None]]:
    cohorts = [planned.cohort(number) for number in range(1, count + 1)]
    return [(dict(cohort.versions), cohort.ended_s) for cohort in cohorts]


def test_a_round_takes_as_long_as_its_last_client() -> None:
    planned = schedule(SynchronousTiming())
    assert steps(planned, 2) == [
        ({"a": 0, "b": 0, "c": 0}, 4.0),
        ({"a": 1, "b": 1, "c": 1}, 8.0),
    ]
    assert planned.needed_after(1) == frozenset()


def test_first_replies_count_with_over_selection() -> None:
    planned = schedule(SynchronousTiming(over_selection=3.0), participation=1 / 3)
    assert steps(planned, 2) == [({"a": 0}, 1.0), ({"a": 1}, 2.0)]
    assert planned.cohort(1).num_late == 2


@pytest.mark.parametrize("num_needed", [50, 100, 190])
def test_a_tenth_more_is_a_tenth_more(num_needed: int) -> None:
    sizes = dict.fromkeys(map(str, range(2 * num_needed)), 1)
    timing = SynchronousTiming(over_selection=1.1)
    planned = schedule(timing, participation=0.5, sizes=sizes)
    assert planned.cohort(1).num_late == num_needed // 10


@pytest.mark.parametrize(
    ("deadline_s", "first"),
    [(2.5, ({"a": 0, "b": 0}, 2.5)), (0.5, ({"a": 0}, 1.0)), (4.0, (None, 4.0))],
)
def test_a_round_ends_at_its_deadline(deadline_s: float, first: Any) -> None:
    """With those who have answered, or else with the first one."""
    planned = schedule(SynchronousTiming(deadline_s=deadline_s))
    step = steps(planned, 1)[0]
    expected = first[0] or {"a": 0, "b": 0, "c": 0}
    assert step == (expected, first[1])
    assert planned.cohort(1).num_late == 3 - len(expected)


def test_steps_with_a_buffer_of_one_by_hand() -> None:
    """c's four seconds are four steps of the others; of two at once, the first name."""
    planned = schedule(BufferedTiming(buffer_size=1))
    assert steps(planned, 6) == [
        ({"a": 0}, 1.0),
        ({"a": 1}, 2.0),
        ({"b": 0}, 2.0),
        ({"a": 2}, 3.0),
        ({"a": 4}, 4.0),
        ({"b": 3}, 4.0),
    ]
    needed = [sorted(planned.needed_after(number)) for number in range(1, 6)]
    assert needed == [[0], [0], [0, 2], [0, 3], [0, 3]]


def test_client_waiting_in_the_buffer_does_not_train_again() -> None:
    planned = schedule(BufferedTiming(buffer_size=2))
    assert steps(planned, 2) == [({"a": 0, "b": 0}, 2.0), ({"a": 1, "b": 1}, 4.0)]
    assert planned.needed_after(1) == {0}
    expected = {"num_rounds": 2, "round_seconds": 2.0, "staleness": 0.0}
    assert planned.client_figures(2)["b"] == expected
    assert planned.client_figures(2)["c"] == {"num_rounds": 0, "round_seconds": 4.0}
    with pytest.raises(RunError, match=r"buffer_size: found 4, .* the 3 clients"):
        schedule(BufferedTiming(buffer_size=4))


@given(
    sizes=st.lists(st.integers(1, 50), min_size=3, max_size=12),
    buffer_size=st.integers(1, 3),
    participation=st.sampled_from([0.1, 0.5, 1.0]),
    available=st.sampled_from([0.3, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_invariants_of_buffered_steps(
    sizes: list[int],
    buffer_size: int,
    participation: float,
    available: float,
    seed: int,
) -> None:
    clients = {f"{i:02d}": size for i, size in enumerate(sizes)}
    devices = DeviceSettings(
        examples_per_s=10, speed_spread=100, available=available, period_s=3
    )

    def plan() -> Schedule:
        timing = BufferedTiming(buffer_size=buffer_size)
        return schedule(timing, participation, devices, clients, RandomKey(seed))

    first = plan()
    cohorts = [first.cohort(number) for number in range(1, 31)]
    free_from, ended_s = dict.fromkeys(clients, 0), 0.0
    for number, cohort in enumerate(cohorts, 1):
        assert len(cohort.versions) == buffer_size
        for client, version in cohort.versions.items():
            # It began after the step that it was last in, and before this one.
            assert free_from[client] <= version < number
            free_from[client] = number
        assert cohort.ended_s is not None
        assert cohort.ended_s >= ended_s
        ended_s = cohort.ended_s
    most = num_participants(len(clients), participation)
    for number in range(1, 30):
        later = {
            version
            for cohort in cohorts[number:]
            for version in cohort.versions.values()
        }
        needed = first.needed_after(number)
        assert {version for version in later if version < number} <= needed
        assert len(needed) <= most
        assert all(version < number for version in needed)
    # The same when it is asked for the end alone.
    again = plan()
    assert again.cohort(30) == cohorts[29]
    assert again.cohort(7) == cohorts[6]


def devices_of(device_settings: DeviceSettings, sizes: Mapping[str, int]) -> Devices:
    return Devices(TrainingSettings(devices=device_settings), sizes, METHOD, KEY)


def test_work_is_examples_and_bytes() -> None:
    device_settings = DeviceSettings(
        examples_per_s=5, bytes_down_per_s=16, bytes_up_per_s=2
    )
    # 10 examples, 32 bytes down, and 8 up.
    assert devices_of(device_settings, {"a": 10}).work_s("a") == 2 + 2 + 4
    training = TrainingSettings(devices=device_settings, local_steps=3, batch_size=32)
    assert Devices(training, {"a": 10}, METHOD, KEY).work_s("a") == 6 + 2 + 4
    training = TrainingSettings(devices=device_settings, local_epochs=2)
    assert Devices(training, {"a": 10}, METHOD, KEY).work_s("a") == 4 + 2 + 4
    # Of the incomplete last batch nothing is trained.
    training = TrainingSettings(devices=device_settings, local_epochs=2, batch_size=4)
    assert Devices(training, {"a": 10}, METHOD, KEY).work_s("a") == 3.2 + 2 + 4


def test_the_spread_is_of_the_middle_95_percent() -> None:
    sizes = dict.fromkeys(map(str, range(4000)), 1)
    devices = devices_of(DeviceSettings(examples_per_s=1, speed_spread=100), sizes)
    seconds = [devices.work_s(client) for client in sizes]
    low, middle, high = np.quantile(seconds, [0.025, 0.5, 0.975])
    assert high / low == pytest.approx(100, rel=0.15)
    assert middle == pytest.approx(1, rel=0.1)


def test_available_fraction_is_constant_over_time() -> None:
    sizes = dict.fromkeys(map(str, range(2000)), 1)
    devices = devices_of(DeviceSettings(available=0.7, period_s=10), sizes)
    for at_s in (0.0, 3.3, 250.0):
        num_available = sum(devices.is_available(client, at_s) for client in sizes)
        assert num_available / 2000 == pytest.approx(0.7, abs=0.04)


@pytest.mark.parametrize("client", ["0", "1", "2", "3"])
def test_work_pauses_while_a_client_is_away(client: str) -> None:
    """Against time in slices of a thousandth."""
    device_settings = DeviceSettings(examples_per_s=1, available=0.5, period_s=2)
    devices = devices_of(device_settings, dict.fromkeys("0123", 5))
    slice_s, done_s, now_s = 0.001, 0.0, 1.0
    while done_s < 5:
        done_s += slice_s * devices.is_available(client, now_s)
        now_s += slice_s
    assert devices.finished_s(client, 1.0) == pytest.approx(now_s, abs=0.05)


@pytest.mark.parametrize(
    ("staleness", "exponent", "expected"), [(0, 0.5, 2.0), (3, 0.5, 1.0), (3, 0, 2.0)]
)
def test_staleness_by_hand(staleness: int, exponent: float, expected: float) -> None:
    timing = BufferedTiming(staleness_exponent=exponent, server_rate=2.0)
    assert staleness_factor(timing, staleness) == pytest.approx(expected)


def test_a_late_update_is_a_change_of_the_present_model() -> None:
    method = FedAvg(linear_task(TrainingSettings()), FedAvg.settings_type())
    then, now = ModelPayload(torch.zeros(2)), ModelPayload(torch.tensor([10.0, 20.0]))
    update = ModelUpdate(torch.tensor([1.0, 2.0]), 3, 0.5)
    moved = rebased(method, update, then, now, 0.5)
    assert moved.weights.tolist() == [10.5, 21.0]
    assert (moved.num_examples, moved.train_loss) == (3, 0.5)


def test_buffers_stay_between_the_two() -> None:
    """A running variance that fell from 1 to 0.5 since, where it now is 0.1."""
    method = FedAvg(normed_task(TrainingSettings()), FedAvg.settings_type())
    count, total = method.task.model.num_parameters, method.task.initial_weights.numel()
    assert count < total
    then, now = (ModelPayload(torch.full((total,), value)) for value in (1.0, 0.1))
    update = ModelUpdate(torch.full((total,), 0.5), 1, 0.0)
    weights = rebased(method, update, then, now, 0.5).weights
    assert weights[:count].tolist() == pytest.approx([-0.15] * count, abs=1e-6)
    assert weights[count:].tolist() == pytest.approx([0.3] * (total - count))


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"local"}))
def test_an_update_that_is_not_late_is_itself(name: str) -> None:
    """For every method: what each tensor started from is known."""
    method = build(METHODS[name], task_for(name, TRAINING))
    before = method.init(CLIENTS, RandomKey(1))
    client, data = CLIENTS[1], noisy(7, 4, seed=1)
    update = client_update(method, before, client, data)[1]
    payload = method.broadcast(before, client, RandomKey(1).child(client))
    moved = rebased(method, update, payload, payload, 1.0)
    parts, expected = take_apart(moved), take_apart(update)
    assert parts.structure == expected.structure
    assert expected.tensors
    for path, tensor in expected.tensors.items():
        assert torch.allclose(parts.tensors[path], tensor, atol=1e-5), path


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"local"} - WITHOUT_BATCH_NORM))
def test_no_variance_is_extrapolated(name: str) -> None:
    """It falls from 1 to nearly 0, twice: of a negative one nothing is predicted."""
    training = replace(TRAINING, local_steps=40, learning_rate=0.01)
    method = build(METHODS[name], task_for(name, training))
    alike = torch.full((8, 2, 2, 1), 100, dtype=torch.uint8)
    data = ClientData(
        Examples(alike, torch.arange(8) % 3), noisy(0, 4, seed=5).validation
    )
    before = method.init(CLIENTS, RandomKey(1))
    # All have the same data, so one training stands for the three.
    trained = client_update(method, before, CLIENTS[0], data)
    updates = dict.fromkeys(CLIENTS, trained)
    present = method.aggregate(before, ((client, trained[1]) for client in CLIENTS))

    def late(client: str) -> tuple[str, Any]:
        key = RandomKey(1).child(client)
        then, now = (
            method.broadcast(state, client, key) for state in (before, present)
        )
        return client, rebased(method, updates[client][1], then, now, 1.0)

    state = method.aggregate(present, map(late, updates))
    images = noisy(6, 0, seed=4).train.images
    for client in (UNSEEN_CLIENT, *CLIENTS):
        memory, personal = (
            None,
            ClientData(no_examples(method.task.spec), no_examples(method.task.spec)),
        )
        if client in updates:
            memory, personal = updates[client][0], data
        payload = method.broadcast(state, client, RandomKey(2))
        served = method.personalize(payload, memory, personal, RandomKey(3))
        assert torch.isfinite(served(images)).all(), client


def test_compression_shortens_the_upload() -> None:
    task = normed_task(TRAINING)
    training = {"compression": {"name": "sign"}}
    chosen = load_experiment(
        document("fedavg", training=training), experiment_catalogue()
    )
    assert chosen.training.compression is not None
    plain = FedAvg(task, FedAvg.settings_type())
    sign = Compressed(task, plain, chosen.training.compression)
    count, total = task.model.num_parameters, task.initial_weights.numel()
    blocks = math.ceil(count / 512)
    assert plain.bytes_up("a") == 4 * total
    assert sign.bytes_up("a") == 4 * blocks + math.ceil(count / 8) + 4 * (total - count)


def run(
    tmp_path: Path, name: str, settings: Any = None, /, **training: Any
) -> RunFolder:
    values = document(
        "fedavg",
        partition={"name": "iid", "num_clients": 6},
        training={"num_rounds": 3, "local_steps": 2, "batch_size": 16, **training},
        run={"engine": "serial", **(settings or {})},
    )
    chosen = load_experiment(values, experiment_catalogue(), folder=tmp_path)
    folder = RunFolder.create(tmp_path / name, chosen)
    simulate(open_workbench(chosen), folder, Observer(), ["test"])
    return folder


def state_of(folder: RunFolder) -> str:
    digest: str = folder.results()["training"]["state_sha256"]
    return digest


def test_time_alone_changes_no_number(tmp_path: Path) -> None:
    plain = run(tmp_path, "plain", participation=0.5)
    timed = run(tmp_path, "timed", participation=0.5, devices={"speed_spread": 100.0})
    assert state_of(timed) == state_of(plain)
    assert "virtual_seconds" not in plain.rounds()[0]
    seconds = [record["virtual_seconds"] for record in timed.rounds()]
    assert 0 < seconds[0] < seconds[1] < seconds[2]
    assert timed.results()["training"]["virtual_seconds"] == seconds[2]
    clients = read_clients(timed.path)
    num_updates = clients["num_rounds"].sum()
    assert num_updates == sum(record["num_clients"] for record in timed.rounds())
    assert (clients["round_seconds"].notna() == clients["seen"]).all()


def test_where_all_are_alike_buffered_steps_are_rounds(tmp_path: Path) -> None:
    """All begin at once and end at once: FedBuff is FedAvg, to the bit."""
    plain = run(tmp_path, "plain")
    num_clients = plain.rounds()[0]["num_clients"]
    timing = {"name": "buffered", "buffer_size": num_clients}
    buffered = run(tmp_path, "buffered", devices={}, timing=timing)
    assert state_of(buffered) == state_of(plain)
    assert [record["staleness_max"] for record in buffered.rounds()] == [0, 0, 0]


def test_a_run_goes_on_with_every_model_that_is_still_trained_with(
    tmp_path: Path,
) -> None:
    """Also where it is of a round that got no checkpoint of its own."""
    late = {
        "num_rounds": 12,
        "devices": {"speed_spread": 100.0},
        "timing": {"name": "buffered", "buffer_size": 1},
    }
    whole = run(tmp_path, "whole", **late)
    rare = run(tmp_path, "rare", {"checkpoint_every": 4}, **late)
    assert state_of(rare) == state_of(whole)
    assert max(record["staleness_max"] for record in rare.rounds()) > 2
    assert rounds_in(rare.checkpoints) == [4, 8, 12]
    bench = open_workbench(rare.experiment(experiment_catalogue()))
    for folder, back in ((rare, 8), (rare, 4), (whole, 8)):
        folder.go_back(back)
        simulate(bench, folder, Observer(), ["test"])
        assert state_of(folder) == state_of(whole)
    # Of a finished run nothing is trained any more.
    simulate(bench, rare, Observer(), ["test"])


def test_a_client_trains_in_the_round_that_begins_with_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a real one: no later learning rate is known when it begins."""
    trained: dict[int, dict[str, int]] = {}
    train = ClientRuntime.train

    def noted(self: ClientRuntime, request: TrainingRequest) -> object:
        in_round = trained.setdefault(request.counted_round, {})
        in_round[request.client] = request.server_round
        return train(self, request)

    monkeypatch.setattr(ClientRuntime, "train", noted)
    timing = {"name": "buffered", "buffer_size": 2}
    late = run(tmp_path, "late", devices={"speed_spread": 100.0}, timing=timing)
    bench = open_workbench(late.experiment(experiment_catalogue()))
    training, sizes = bench.experiment.training, bench.roster.trainable()
    planned = schedule_of(training, sizes, bench.method, bench.key)
    for number in (1, 2, 3):
        versions = planned.cohort(number).versions
        assert trained[number] == {client: versions[client] + 1 for client in versions}
    assert any(record["staleness_max"] for record in late.rounds())


def test_a_timing_needs_devices(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"training\.timing: .* without training\.dev"
    ):
        run(tmp_path, "none", timing={"name": "buffered"})
    with pytest.raises(ConfigError, match=r"unknown name 'bufered'; did you mean"):
        run(tmp_path, "typo", devices={}, timing={"name": "bufered"})
