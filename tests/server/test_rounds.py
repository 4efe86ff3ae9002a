"""The round loop against a federation of functions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knnper.errors import RunError
from knnper.experiment import FederationSettings, RunSettings, TrainingSettings
from knnper.records import fingerprint
from knnper.seeding import RandomKey
from knnper.server.checkpoints import Checkpoint, CheckpointFolder
from knnper.server.claims import cap_claims
from knnper.server.explosion import ExplodedError
from knnper.server.federation import Federation, Reply, Request, Step
from knnper.server.observer import RoundRecord
from knnper.server.roster import Member, Roster
from knnper.server.rounds import RoundLoop
from knnper.strategies.core.evaluation import (
    NUM_CALIBRATION_BINS,
    Evaluation,
    Validation,
)
from knnper.strategies.core.method import Method, UpdateProblem
from knnper.strategies.core.records import ModelPayload, ModelState, ModelUpdate
from knnper.transport.messages import Purpose

CLIENTS = ("a", "b", "c", "d")

# Too large for two to be served together.
SIZES = {"a": 1000, "b": 3000, "c": 1000, "d": 2000}

Answer = Callable[[str, ModelPayload, int], Reply]


class Functions(Federation):
    """A federation whose clients are one function."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.keep_rounds: list[Sequence[int]] = []
        self.awaited: list[tuple[Sequence[str], int]] = []
        self.validated: list[Request] = []

    def await_clients(self, clients: Sequence[str], least: int) -> None:
        self.awaited.append((clients, least))

    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        if step.purpose is Purpose.VALIDATE:
            yield from self.validate(requests)
            return
        self.keep_rounds.append(step.keep_rounds)
        for request in requests:
            assert isinstance(request.payload, ModelPayload)
            yield self.answer(request.client, request.payload, step.server_round)

    def validate(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Client a has nothing, b fails, c is right once of twice, d twice of twice.

        Of their own models c's is right twice; d's fails, and a's is said to be right.
        """
        answers = {"a": (0, 1), "c": (1, 2), "d": (2, 0)}
        for request in requests:
            self.validated.append(request)
            if request.client not in answers:
                yield Reply(request.clients, None, "asleep")
                continue
            correct, personal = answers[request.client]
            figures = evaluation(2 if correct else 0, correct)
            total = {"a": 2000, "c": 2, "d": 0}[request.client]
            failures = {} if personal else {request.client: "too fast"}
            if request.reference is None:
                total, personal, failures = 0, 0, {}
            yield Reply(request.clients, Validation(figures, total, personal, failures))


def evaluation(total: int, correct: int) -> Evaluation:
    """Return an evaluation in which nothing was predicted with any confidence."""
    rest = (0,) * (NUM_CALIBRATION_BINS - 1)
    none = (0.0,) * NUM_CALIBRATION_BINS
    return Evaluation(total, correct, 0.0, (total, *rest), none, (correct, *rest))


class TwoZeros(Method):
    """The server's half of FedAvg, on two weights."""

    def __init__(self) -> None:
        pass

    def init(self, clients: Sequence[str], rng: RandomKey) -> ModelState:
        return ModelState(torch.zeros(2))


def method(num_rounds: int, update_problem: UpdateProblem | None = None) -> Method:
    two_zeros = TwoZeros()
    two_zeros.num_rounds, two_zeros.update_problem = num_rounds, update_problem
    return two_zeros


def add_one(client: str, payload: ModelPayload, server_round: int) -> Reply:
    """Client a, b, c, d has 1, 2, 3, 4 examples and moves by as much."""
    n = CLIENTS.index(client) + 1
    return Reply((client,), ModelUpdate(payload.weights + n, n, float(n)))


def saying(record: Any, *names: str, at: int = 1) -> Answer:
    """Answer with a record, or a failure's text, for some clients in a round."""

    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        if client not in names or server_round != at:
            return add_one(client, payload, server_round)
        is_text = isinstance(record, str)
        return Reply((client,), *((None, record) if is_text else (record,)))

    return answer


def moving(moved: float = 0.1, loss: Callable[[str, int], float] | None = None) -> Any:
    """Answer with weights that moved so far, and with a loss of client and round."""

    def answer(client: str, payload: ModelPayload, number: int) -> Reply:
        reported_loss = loss(client, number) if loss else 0.5
        return Reply((client,), ModelUpdate(payload.weights + moved, 1, reported_loss))

    return answer


def train(
    folder: Path,
    answer: Answer,
    num_rounds: int = 2,
    participation: float = 1.0,
    round_attempts: int = 1,
    update_problem: UpdateProblem | None = None,
    claimed: Sequence[str] = (),
    trusts_clients: bool = True,
    **run: Any,
) -> tuple[Checkpoint, list[RoundRecord], Functions]:
    records: list[RoundRecord] = []
    federation = Functions(answer)
    federation.round_attempts = round_attempts
    federation.trusts_clients = trusts_clients
    checkpoints = CheckpointFolder(folder, "test")
    members = [
        Member(name, True, size, size, 0, is_claim=name in claimed)
        for name, size in SIZES.items()
    ]
    training = TrainingSettings(num_rounds=num_rounds, participation=participation)
    experiment = SimpleNamespace(
        training=training, run=RunSettings(**run), privacy=None
    )
    trained_method = method(num_rounds, update_problem)
    assembly: Any = SimpleNamespace(
        method=trained_method, key=RandomKey(0), experiment=experiment
    )
    roster = Roster.of(members, "")

    def forget_after(server_round: int) -> None:
        records[:] = [
            record for record in records if record["server_round"] <= server_round
        ]

    loop = RoundLoop(
        assembly, federation, roster, checkpoints, records.append, forget_after
    )
    untrained = ModelState(torch.zeros(2))
    start = checkpoints.load_latest(ModelState)
    start = start or Checkpoint(0, untrained, fingerprint(untrained))
    return loop.train(start), records, federation


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    trained, records, _ = train(tmp_path, add_one)
    # (1*1 + 2*2 + 3*3 + 4*4) / 10 = 3 a round.
    assert trained.state.weights.tolist() == [6.0, 6.0]
    assert [record["server_round"] for record in records] == [1, 2]
    assert records[0]["train_loss"] == 3.0
    assert records[0]["num_clients"] == 4
    assert "failures" not in records[0]
    # Two float32 weights to and from four clients.
    assert records[0]["bytes_down"] == records[0]["bytes_up"] == 32


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, float("nan")], "weights is not finite"),
        ([1.0, float("inf")], "weights is not finite"),
        ([1.0, 1.0, 1.0], "expected tensors of shapes"),
    ],
)
def test_an_update_that_cannot_be_used_is_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weights: list[float], message: str
) -> None:
    answer = saying(ModelUpdate(torch.tensor(weights), 1, 0.0), "c")
    trained, records, _ = train(tmp_path, answer, num_rounds=1)
    # (1 + 4 + 16) / 7
    assert trained.state.weights.tolist() == pytest.approx([3.0, 3.0])
    assert records[0]["num_failed"] == 1
    assert f"client c failed: {message}" in caplog.text


@pytest.mark.parametrize(
    ("failing", "limit"), [(CLIENTS, 1.0), (CLIENTS[:3], 0.5), (CLIENTS[:1], 0.0)]
)
def test_too_many_failures_end_the_run_at_the_last_checkpoint(
    tmp_path: Path, failing: Sequence[str], limit: float
) -> None:
    answer = saying("gone", *failing, at=2)
    with pytest.raises(RunError, match=r"round 2: .* of 4 clients failed"):
        train(tmp_path, answer, max_failed_fraction=limit)
    latest = CheckpointFolder(tmp_path, "test").load_latest(ModelState)
    assert latest is not None
    assert latest.server_round == 1
    assert latest.state.weights.tolist() == [3.0, 3.0]


def test_an_interrupted_run_ends_with_the_same_state(tmp_path: Path) -> None:
    whole, _, _ = train(tmp_path / "whole", add_one, 7, 0.5, checkpoint_every=2)

    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        if server_round == 6:
            raise KeyboardInterrupt
        return add_one(client, payload, server_round)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", answer, 7, 0.5, checkpoint_every=2)
    resumed, records, federation = train(
        tmp_path / "cut", add_one, 7, 0.5, checkpoint_every=2
    )
    assert [record["server_round"] for record in records] == [5, 6, 7]
    # The server may go back to either of its two checkpoints.
    assert federation.keep_rounds[0] == [2, 4]
    assert resumed.fingerprint == whole.fingerprint


def test_validation_pools_all_clients_that_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, records, ran = train(tmp_path / "own", add_one, num_rounds=3, validate_every=2)
    accuracies = [record.get("validation_accuracy") for record in records]
    assert accuracies == [None, 3 / 4, None]
    personal_accuracies = [
        record.get("validation_accuracy_personal") for record in records
    ]
    assert personal_accuracies == [None, 2 / 2, None]
    assert "round 2: client b failed: asleep" in caplog.text
    assert "round 2: client d failed: too fast" in caplog.text
    assert "right on 1 of 2000 examples where there are at most 1000" in caplog.text
    assert [request.state_rounds for request in ran.validated] == [(2,)] * 4
    settings: dict[str, Any] = {"validate_every": 2, "validate_personal": False}
    _, records, _ = train(tmp_path / "global", add_one, num_rounds=2, **settings)
    assert records[1]["validation_accuracy"] == 3 / 4
    assert "validation_accuracy_personal" not in records[1]


def test_the_client_with_most_to_do_comes_first(tmp_path: Path) -> None:
    requested: list[str] = []

    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        requested.append(client)
        return add_one(client, payload, server_round)

    train(tmp_path, answer, num_rounds=1)
    assert requested == ["b", "d", "a", "c"]


def test_an_update_that_the_method_takes_offence_at_is_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def problem(payload: ModelPayload, update: ModelUpdate) -> str | None:
        return "too far" if float((update.weights - payload.weights)[0]) > 3 else None

    trained, records, _ = train(tmp_path, add_one, num_rounds=1, update_problem=problem)
    # (1 + 4 + 9) / 6
    assert trained.state.weights.tolist() == pytest.approx([14 / 6, 14 / 6])
    assert records[0]["num_failed"] == 1
    assert "client d failed: too far" in caplog.text


def test_an_update_of_another_method_is_a_failure(tmp_path: Path) -> None:
    answer = saying(ModelPayload(torch.zeros(2)), *CLIENTS)
    with pytest.raises(RunError, match="expected a ModelUpdate, found a ModelPayload"):
        train(tmp_path, answer)


@pytest.mark.parametrize("ratio", [1000.0, 2.0])
def test_an_update_of_an_enormous_norm_is_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ratio: float
) -> None:
    # What was sent is zero, so the most that is taken is ratio x (0 + 1).
    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        length = ratio * (1.01 if client == "c" else 0.99)
        weights = torch.tensor([0.6, 0.8]) * length
        return Reply((client,), ModelUpdate(weights, 1, 0.0))

    trained, records, _ = train(
        tmp_path, answer, num_rounds=1, max_update_norm_ratio=ratio
    )
    assert float(trained.state.weights.norm()) == pytest.approx(0.99 * ratio)
    assert records[0]["num_failed"] == 1
    assert "client c failed: the update moved by a norm of" in caplog.text


def test_a_client_that_fails_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = saying("no\nroom\x1b[2J" + 9999 * "x", "d")
    trained, (record,), _ = train(tmp_path, answer, num_rounds=1)
    # (1 + 4 + 9) / 6
    assert trained.state.weights.tolist() == pytest.approx([14 / 6, 14 / 6])
    assert "client d failed: no\\nroom" in caplog.text
    assert (record["num_failed"], list(record["failures"])) == (1, ["d"])
    assert record["failures"]["d"].startswith("no\\nroom\\x1b[2Jxxx")
    assert len(record["failures"]["d"]) == 500


def test_an_update_that_is_scaled_by_900_is_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would pass ``max_update_norm_ratio``, and take the mean."""

    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        scale = 900 if (client, server_round) == ("b", 2) else 1
        weights = payload.weights + 0.1 * scale
        return Reply((client,), ModelUpdate(weights, SIZES[client], 0.5))

    trained, records, _ = train(tmp_path, answer, num_rounds=3)
    assert trained.state.weights.tolist() == pytest.approx([0.3, 0.3])
    assert [record["num_failed"] for record in records] == [0, 1, 0]
    assert "run.max_update_median_ratio" in records[1]["failures"]["b"]
    assert "round 2: client b failed: weights moved by a norm of" in caplog.text


def test_norms_of_earlier_rounds_survive_a_kill(tmp_path: Path) -> None:
    """One client a round is judged by the rounds before, made by another process."""

    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        moved = 90.0 if server_round == 3 else 0.1
        return Reply((client,), ModelUpdate(payload.weights + moved, 1, 0.5))

    train(tmp_path, answer, num_rounds=2, participation=0.25)
    with pytest.raises(RunError, match=r"max_update_median_ratio") as caught:
        train(tmp_path, answer, num_rounds=3, participation=0.25)
    assert "round 3: 1 of 1 clients failed" in str(caught.value)


@pytest.mark.parametrize(
    ("claimed", "expected"),
    [
        ((), {"b": 2**53}),
        (("a", "b"), {"b": 4000}),
        (("a", "b", "c", "d"), {"b": 4000}),
    ],
)
def test_claimed_count_is_capped_at_half_of_a_round(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    claimed: Sequence[str],
    expected: dict[str, int],
) -> None:
    monkeypatch.setitem(SIZES, "b", 2**53)
    others = {"a": 1000, "c": 1000, "d": 2000}
    weights = {**others, **expected}

    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        moved = 1.0 if client == "b" else 0.0
        return Reply(
            (client,), ModelUpdate(payload.weights + moved, SIZES[client], 0.5)
        )

    # Of the two limits on a claim, the one that is part of the round.
    limits = FederationSettings(max_weight_ratio=None)
    trained, _, _ = train(
        tmp_path, answer, claimed=claimed, num_rounds=2, federation=limits
    )
    share = weights["b"] / sum(weights.values())
    assert trained.state.weights.tolist() == pytest.approx([2 * share] * 2)
    warned = [
        message for message in caplog.messages if "run.federation.max_share" in message
    ]
    assert len(warned) == bool(claimed), "once, not in each round"


@pytest.mark.parametrize(
    ("claimed", "weight"),
    # Each of the two weighs twice the median of 1000, 1000, 1000, 2000 and 2**53; what
    # the operator fixed is taken as it is.
    [("abcde", 2000), ("acde", 2**53), ("", 2**53)],
)
def test_two_clients_do_not_take_a_round_by_what_they_claim(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    claimed: str,
    weight: int,
) -> None:
    sizes = {"a": 1000, "b": 2**53, "c": 1000, "d": 2**53, "e": 1000}
    for client, size in sizes.items():
        monkeypatch.setitem(SIZES, client, size)

    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        moved = {"b": 1.0, "d": 0.0}.get(client, 0.0)
        return Reply((client,), ModelUpdate(payload.weights + moved, 2**53, 0.5))

    trained, _, _ = train(tmp_path, answer, claimed=claimed, num_rounds=1)
    weights = {**sizes, "b": weight, "d": 2000 if "d" in claimed else 2**53}
    share = weights["b"] / sum(weights.values())
    assert trained.state.weights.tolist() == pytest.approx([share] * 2)
    cut = [client for client in "bd" if f"client {client} reports" in caplog.text]
    assert cut == [client for client in "bd" if client in claimed]
    if claimed == "abcde":
        assert 2 * share == pytest.approx(4 / 7), "of both together, not all of it"


GOALS = {"a": (3.2, 1.0), "b": (2.8, 1.1), "c": (3.0, 0.7), "d": (3.1, 1.2)}
GOALS["e"] = (2.9, 1.0)


def going_half_way(flipped: Mapping[str, float], until: int = 10**9) -> Answer:
    """Answer with weights half-way to a client's goal, or so many times away from it.

    The loss is half the squared distance to the goal. ``until``: The last round that is
    answered.
    """

    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        if server_round > until:
            raise KeyboardInterrupt
        gap = torch.tensor(GOALS[client]) - payload.weights
        moved = 0.5 * gap * -flipped.get(client, -1.0)
        loss = float(0.5 * gap @ gap)
        return Reply((client,), ModelUpdate(payload.weights + moved, 10, loss))

    return answer


@pytest.fixture
def five_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    for client in GOALS:
        monkeypatch.setitem(SIZES, client, 100)


def distance(trained: Checkpoint) -> float:
    """Return how far the model is from the mean of all goals, (3, 1)."""
    return float((trained.state.weights - torch.tensor([3.0, 1.0])).norm())


NOT_CLIPPED = FederationSettings(clip_median_ratio=None)


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
@pytest.mark.usefixtures("five_clients")
def test_flipped_updates_of_one_client_do_not_explode_the_training(
    tmp_path: Path, scale: float
) -> None:
    answer = going_half_way({"b": scale})
    trained, records, _ = train(tmp_path, answer, 20, trusts_clients=False)
    assert distance(trained) < 0.6
    assert [record["server_round"] for record in records] == list(range(1, 21))
    clipped = [record for record in records if "b" in record.get("clipped", {})]
    failed = [record for record in records if "b" in record.get("failures", {})]
    assert bool(clipped) == (scale > 1)
    assert bool(failed) == (scale > 10)


@pytest.mark.usefixtures("five_clients")
def test_virtual_clients_are_not_clipped(tmp_path: Path) -> None:
    with pytest.raises(ExplodedError, match="the training has exploded in rounds"):
        train(tmp_path, going_half_way({"b": 10.0}), 20)


@pytest.mark.parametrize("scale", [5.0, 10.0, 30.0])
@pytest.mark.usefixtures("five_clients")
def test_exploded_training_is_made_again_without_the_suspect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scale: float
) -> None:
    answer = going_half_way({"b": scale})
    trained, records, _ = train(
        tmp_path, answer, 20, trusts_clients=False, federation=NOT_CLIPPED
    )
    # The mean of the other goals.
    assert trained.state.weights.tolist() == pytest.approx([3.05, 0.975], abs=1e-4)
    assert [record["server_round"] for record in records] == list(range(1, 21))
    assert all(record["left_out"] == ["b"] for record in records)
    assert {record["num_clients"] for record in records} == {4}
    exclusion = trained.history.left_out["b"]
    assert exclusion["after_round"] == 0
    assert exclusion["cosine"] < -0.9
    assert "Going back to round 0; client b is left out" in caplog.text


@pytest.mark.usefixtures("five_clients")
def test_training_that_explodes_late_goes_back_to_its_last_good_round(
    tmp_path: Path,
) -> None:
    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        flipped = {"b": 10.0, "d": 8.0} if server_round > 12 else {}
        return going_half_way(flipped)(client, payload, server_round)

    trained, records, _ = train(
        tmp_path, answer, 30, trusts_clients=False, federation=NOT_CLIPPED
    )
    # Two of five stand out together.
    assert set(trained.history.left_out) == {"b", "d"}
    after = {
        exclusion["after_round"] for exclusion in trained.history.left_out.values()
    }
    assert after <= {10, 11, 12, 13}
    assert [record.get("left_out", []) for record in records] == [
        ["b", "d"] if number > min(after) else [] for number in range(1, 31)
    ]
    mean = torch.tensor([GOALS[client] for client in "ace"]).mean(dim=0)
    assert trained.state.weights.tolist() == pytest.approx(mean.tolist(), abs=1e-4)


@pytest.mark.parametrize("until", [3, 5, 7, 9])
@pytest.mark.usefixtures("five_clients")
def test_run_that_is_killed_while_it_explodes_ends_the_same(
    tmp_path: Path, until: int
) -> None:
    settings: dict[str, Any] = {"trusts_clients": False, "federation": NOT_CLIPPED}
    flipped = {"b": 10.0}
    whole, _, _ = train(tmp_path / "whole", going_half_way(flipped), 12, **settings)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", going_half_way(flipped, until), 12, **settings)
    resumed, _, _ = train(tmp_path / "cut", going_half_way(flipped), 12, **settings)
    assert resumed.fingerprint == whole.fingerprint
    assert resumed.history == whole.history
    assert set(resumed.history.left_out) == {"b"}


@pytest.mark.parametrize("flipped", [GOALS, "abc"])
@pytest.mark.usefixtures("five_clients")
def test_explosion_of_most_clients_ends_the_run(tmp_path: Path, flipped: str) -> None:
    """As with too large a learning rate: no minority stands out."""
    answer = going_half_way(dict.fromkeys(flipped, 10.0))
    with pytest.raises(ExplodedError, match="the training has exploded in round"):
        train(tmp_path, answer, 20, trusts_clients=False)


@pytest.mark.usefixtures("five_clients")
def test_round_in_which_most_diverge_is_an_explosion(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"trusts_clients": False, "federation": NOT_CLIPPED}

    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        if float(payload.weights.norm()) > 1000:
            return Reply((client,), None, "training diverged: lower the rate")
        return going_half_way({"b": 30.0})(client, payload, server_round)

    trained, _, _ = train(tmp_path, answer, 20, **settings)
    assert set(trained.history.left_out) == {"b"}
    assert trained.state.weights.tolist() == pytest.approx([3.05, 0.975], abs=1e-4)


@pytest.mark.usefixtures("five_clients")
def test_divergence_reported_by_a_minority_is_no_explosion(tmp_path: Path) -> None:
    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        if client in "ab" and server_round > 3:
            return Reply((client,), None, "training diverged: lower the rate")
        return going_half_way({})(client, payload, server_round)

    with pytest.raises(RunError, match="round 4: 2 of 5 clients failed") as caught:
        train(tmp_path, answer, 9, trusts_clients=False, max_failed_fraction=0.0)
    assert not isinstance(caught.value, ExplodedError)


def explodes_from(server_round: int) -> Any:
    return moving(loss=lambda _, number: 1e4 if number >= server_round else 0.5)


def test_a_training_that_explodes_ends_at_its_last_good_round(tmp_path: Path) -> None:
    with pytest.raises(ExplodedError, match="The last good round is 4"):
        train(tmp_path, explodes_from(5), num_rounds=20)
    folder = CheckpointFolder(tmp_path, "test")
    assert folder.rounds() == [1, 2, 3, 4], "rounds 5 to 7 have none"
    latest = folder.load_latest(ModelState)
    assert latest is not None
    assert latest.history.lowest_loss == 0.5


def test_a_training_does_not_end_with_an_explosion(tmp_path: Path) -> None:
    with pytest.raises(ExplodedError, match=r"in round 6: .* last good round is 5"):
        train(tmp_path, explodes_from(6), num_rounds=6)


def test_a_training_may_explode_where_that_is_asked_for(tmp_path: Path) -> None:
    trained, _, _ = train(tmp_path, explodes_from(2), num_rounds=6, exploding_rounds=0)
    assert trained.server_round == 6


def test_a_training_that_calms_down_goes_on(tmp_path: Path) -> None:
    answer = moving(loss=lambda _, number: 1e4 if number in (3, 4, 6, 7) else 0.5)
    assert train(tmp_path, answer, num_rounds=8)[0].server_round == 8


def test_huge_loss_of_one_client_does_not_end_the_training(tmp_path: Path) -> None:
    answer = moving(loss=lambda client, _: 1e99 if client == "b" else 0.5)
    assert train(tmp_path, answer, num_rounds=5)[0].server_round == 5


def test_a_round_with_too_many_failures_is_made_again(tmp_path: Path) -> None:
    requested: list[str] = []

    def answer(client: str, payload: ModelPayload, server_round: int) -> Reply:
        requested.append(client)
        if len(requested) <= 3:
            return Reply((client,), None, "gone")
        return add_one(client, payload, server_round)

    trained, records, federation = train(
        tmp_path, answer, num_rounds=1, round_attempts=2, max_failed_fraction=0.5
    )
    assert trained.state.weights.tolist() == [3.0, 3.0], "as if nothing had happened"
    assert records[0]["num_failed"] == 0
    # Of four clients, half may fail: two are waited for, before each attempt.
    assert federation.awaited == [(["b", "d", "a", "c"], 2)] * 2


def test_after_the_last_attempt_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="4 of 4 clients failed"):
        train(tmp_path, saying("gone", *CLIENTS), num_rounds=1, round_attempts=3)


LARGEST = 2**53


@pytest.mark.parametrize(
    ("counts", "claimed", "most_times", "expected"),
    [
        # The median of 100, 100, 300, 900, LARGEST is 300.
        (
            {"a": LARGEST, "b": 900, "c": 300, "d": 100, "e": 100},
            "abcde",
            2.0,
            {"a": 600, "b": 600},
        ),
        (
            {"a": LARGEST, "b": 900, "c": 300, "d": 100, "e": 100},
            "acde",
            2.0,
            {"a": 600},
        ),
        # Two of four: the lower median is that of the others.
        (
            {"a": LARGEST, "b": LARGEST, "c": 100, "d": 100},
            "abcd",
            2.0,
            {"a": 200, "b": 200},
        ),
        ({"a": 5, "b": 1}, "ab", 2.0, {"a": 2}),
        ({"a": 70}, "a", 2.0, {}),
        ({"a": LARGEST, "b": 100, "c": 1}, "abc", None, {}),
        ({}, "", 2.0, {}),
    ],
)
def test_claims_in_multiples_of_the_median_by_hand(
    counts: dict[str, int],
    claimed: str,
    most_times: float | None,
    expected: dict[str, int],
) -> None:
    assert cap_claims(counts, set(claimed), 1.0, most_times) == {**counts, **expected}


@pytest.mark.parametrize(
    ("counts", "claimed", "most", "expected"),
    [
        # As much as all others together.
        ({"a": LARGEST, "b": 100, "c": 300}, "a", 0.5, {"a": 400}),
        ({"a": LARGEST, "b": 100}, "ab", 0.5, {"a": 100}),
        ({"a": 400, "b": 100, "c": 300}, "abc", 0.5, {}),
        ({"a": LARGEST, "b": 100}, "b", 0.5, {}),
        ({"a": LARGEST, "b": 100}, "ab", 1.0, {}),
        # A fifth each: w = 0.2 (w + w + 600).
        ({"a": 5000, "b": 900, "c": 600}, "ab", 0.2, {"a": 200, "b": 200}),
        # Less than the smallest is nobody's share of three.
        ({"a": 30, "b": 20, "c": 10}, "abc", 0.1, {"a": 10, "b": 10, "c": 10}),
        ({"a": 70}, "a", 0.5, {}),
        ({"a": 5, "b": 1}, "a", 0.01, {"a": 1}),
        ({}, "", 0.5, {}),
    ],
)
def test_counts_by_hand(
    counts: dict[str, int], claimed: str, most: float, expected: dict[str, int]
) -> None:
    assert cap_claims(counts, set(claimed), most) == {**counts, **expected}


@given(
    st.lists(st.integers(1, LARGEST), min_size=2, max_size=9),
    st.sampled_from([0.25, 0.5, 0.75, 0.9]),
)
def test_no_claim_exceeds_its_share_where_that_is_possible(
    numbers: list[int], most: float
) -> None:
    counts = {str(place): number for place, number in enumerate(numbers)}
    capped = cap_claims(counts, set(counts), most)
    assert all(1 <= capped[name] <= counts[name] for name in counts)
    # With one of two at a quarter there is nobody for the other half.
    if most * len(counts) >= 1:
        assert max(capped.values()) <= most * sum(capped.values()) * (1 + 1e-9) + 1
