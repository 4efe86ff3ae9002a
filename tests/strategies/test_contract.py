"""The contract of all methods and personalisations in the catalogue."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from knnper import strategies
from knnper.data.examples import ClientData, Examples
from knnper.experiment import MultiStepSchedule, TrainingSettings
from knnper.records import Parts, fingerprint, is_finite, put_together, take_apart
from knnper.seeding import RandomKey
from knnper.server.federation import Reply
from knnper.server.screening import UpdateChecks
from knnper.strategies.catalogue import METHODS, PERSONALIZERS, trained_as
from knnper.strategies.core.method import AS_IT_IS, UNSEEN_CLIENT, Method
from knnper.strategies.core.predictors import EmbeddingPredictor, Predictor
from knnper.strategies.core.records import Record
from knnper.strategies.core.task import Task
from tests.strategies.method_checks import count_embeddings
from tests.strategies.tiny import OF_STATISTICS, noisy, task_for

TRAINING = TrainingSettings(num_rounds=2, batch_size=4, learning_rate=0.1)
CLIENTS = ("a", "b", "c")
WITH_ROUNDS = sorted(name for name, kind in METHODS.items() if kind.upload != "0")


@dataclass(frozen=True)
class Trained:
    """A method, its clients' data, and what is known after one round."""

    task: Task
    method: Method
    data: dict[str, ClientData]
    before: Any
    updates: Sequence[tuple[str, Any]]
    memory: dict[str, Any]
    state: Any


def build(spec: type[Method], task: Task, on_top: str | None = None) -> Method:
    """Build a method with its personalisation, or with ``on_top`` in its place."""
    top = PERSONALIZERS[on_top or spec.personalization]
    method = spec(task, spec.settings_type())
    return top(task, method, top.settings_type())


def client_update(
    method: Method,
    state: Any,
    client: str,
    data: ClientData,
    memory: Any = None,
    server_round: int = 1,
) -> tuple[Any, Any]:
    """Train a client in a round; return its state and its update."""
    rng = RandomKey(server_round).child(client)
    payload = method.broadcast(state, client, rng)
    return method.client_update(payload, memory, data, server_round, rng)


def train(name: str, on_top: str | None = None, **of_task: Any) -> Trained:
    """Train a method for one round; the server has examples of its own."""
    proxy = noisy(7, 0, seed=2).train
    task = replace(task_for(name, TRAINING), proxy=lambda: proxy, **of_task)
    method = build(METHODS[name], task, on_top)
    data = {client: noisy(6 + i, 4, seed=i) for i, client in enumerate(CLIENTS)}
    before = method.init(CLIENTS, RandomKey(1))
    if method.num_rounds == 0:
        return Trained(task, method, data, before, (), {}, before)
    results = {c: client_update(method, before, c, data[c]) for c in CLIENTS}
    updates = [(client, results[client][1]) for client in CLIENTS]
    memory = {client: results[client][0] for client in CLIENTS}
    state = method.aggregate(before, iter(updates))
    return Trained(task, method, data, before, updates, memory, state)


trained = functools.cache(train)
"""As `train`, with one shared result for the same arguments: do not change it."""


def personal(run: Trained, client: str, data: ClientData, seed: int = 3) -> Predictor:
    """Personalise for a client after the round."""
    payload = run.method.broadcast(run.state, client, RandomKey(2))
    return run.method.personalize(
        payload, run.memory.get(client), data, RandomKey(seed)
    )


def test_every_file_holds_a_method() -> None:
    folder = Path(strategies.__path__[0])
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "catalogue"}
    kinds = {**METHODS, **PERSONALIZERS}
    assert {kind.__module__.rpartition(".")[2] for kind in kinds.values()} == {
        *files,
        "method",  # defines `AsItIs`
    }
    assert all(kind.name == name for name, kind in kinds.items())
    with pytest.raises(TypeError):
        METHODS["fedavg"] = METHODS["local"]  # type: ignore[index]


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_round_moves_the_model_and_is_deterministic(name: str) -> None:
    run, second = trained(name), train(name)
    assert run.method.num_rounds == TRAINING.num_rounds
    assert fingerprint(run.state) != fingerprint(run.before)
    assert fingerprint(run.state) == fingerprint(second.state)
    for client, update in run.updates:
        assert update.num_examples == len(run.data[client].train)
        assert 0 < update.train_loss < math.inf
        assert fingerprint(run.memory[client]) == fingerprint(second.memory[client])
    # Whatever was trained before.
    memory, update = client_update(run.method, run.before, "a", run.data["a"])
    assert fingerprint(update) == fingerprint(run.updates[0][1])
    assert fingerprint(memory) == fingerprint(run.memory["a"])


@pytest.mark.parametrize("name", METHODS)
def test_records_survive_the_codec(name: str) -> None:
    run = trained(name)
    method = run.method
    pairs: list[tuple[type[Record], Any]] = [
        (method.state_type, run.before),
        (method.state_type, run.state),
    ]
    for client in (*CLIENTS, UNSEEN_CLIENT):
        payload = method.broadcast(run.state, client, RandomKey(2))
        pairs.append((method.payload_type, payload))
    pairs += [(method.update_type, update) for _, update in run.updates]
    pairs += [(method.client_state_type, memory) for memory in run.memory.values()]
    for record_type, record in pairs:
        assert type(record) is record_type
        copied = put_together(record_type, take_apart(record))
        assert fingerprint(copied) == fingerprint(record)


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_no_argument_of_a_round_is_changed(name: str) -> None:
    run = trained(name)
    payload = run.method.broadcast(run.state, "a", RandomKey(2))
    arguments = [run.state, payload, run.memory["a"]]
    arguments += [update for _, update in run.updates]
    marks = [fingerprint(argument) for argument in arguments]
    initial = run.task.initial_weights.clone()
    images = run.data["a"].train.images.clone()
    run.method.client_update(payload, run.memory["a"], run.data["a"], 2, RandomKey(2))
    run.method.aggregate(run.state, iter(run.updates))
    predictor = run.method.personalize(
        payload, run.memory["a"], run.data["a"], RandomKey(2)
    )
    predictor(run.data["a"].validation.images)
    assert [fingerprint(argument) for argument in arguments] == marks
    assert torch.equal(run.data["a"].train.images, images)
    assert torch.equal(run.task.initial_weights, initial)


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_the_order_of_the_clients_does_not_matter(name: str) -> None:
    run = trained(name)
    reverse = run.method.aggregate(run.before, iter(run.updates[::-1]))
    expected, tensors = take_apart(run.state).tensors, take_apart(reverse).tensors
    assert expected.keys() == tensors.keys()
    for path, tensor in expected.items():
        torch.testing.assert_close(tensors[path], tensor, rtol=1e-5, atol=1e-6)


SIZES = [(0, 0, 3), (0, 2, 3), (1, 0, 3), (1, 1, 3), (2, 1, 3), (6, 4, 1), (6, 4, 3)]
"""Lengths of the training and the validation split, and numbers of labels."""


@pytest.mark.parametrize("known_as", ["a", UNSEEN_CLIENT])
@pytest.mark.parametrize("name", METHODS)
def test_every_client_is_served_probabilities(name: str, known_as: str) -> None:
    run, queries = trained(name), noisy(5, 0, seed=10).train.images
    for num_train, num_validation, labels in SIZES:
        data = noisy(num_train, num_validation, seed=9, labels=labels)
        predictor, again = (personal(run, known_as, data) for _ in range(2))
        served = predictor(queries)
        assert served.shape == (5, 3)
        assert served.dtype == torch.float32
        assert bool((served >= 0).all())
        torch.testing.assert_close(served.sum(dim=1), torch.ones(5))
        assert torch.equal(served, again(queries))
        assert predictor(queries[:0]).shape == (0, 3)
        assert all(isinstance(value, float) for value in predictor.describe().values())


@pytest.mark.parametrize("name", METHODS)
def test_without_data_everyone_is_served_the_unpersonalised_model(name: str) -> None:
    run, queries = trained(name), noisy(5, 0, seed=10).train.images
    nothing = noisy(0, 0, seed=9)
    payload = run.method.broadcast(run.state, UNSEEN_CLIENT, RandomKey(2))
    served = [
        run.method.personalize(payload, memory, nothing, RandomKey(seed))(queries)
        for seed, memory in [(3, None), (4, run.memory.get("a"))]
    ]
    assert torch.equal(served[0], served[1])
    if hasattr(run.state, "weights"):
        expected = run.task.probabilities(run.state.weights, queries)
        assert torch.equal(served[0], expected)


WITH_PERSONALIZATION = [
    name for name in METHODS if METHODS[name].personalization != AS_IT_IS
]
"""Methods with the rounds of another one and a personalisation on top."""


@pytest.mark.parametrize(
    ("name", "on_top"),
    [
        *((name, METHODS[name].personalization) for name in WITH_PERSONALIZATION),
        *itertools.product(
            ("fedavg", "scaffold"), sorted({*PERSONALIZERS} - {AS_IT_IS})
        ),
    ],
)
def test_rounds_are_the_methods_own(name: str, on_top: str) -> None:
    topped = trained(name, on_top)
    plain = trained(trained_as(name), AS_IT_IS)
    assert topped.method.num_rounds == plain.method.num_rounds
    # A personalisation may add tensors, but must not change the method's.
    expected, tensors = (take_apart(run.state).tensors for run in (plain, topped))
    assert all(torch.equal(tensors[path], expected[path]) for path in expected)
    assert len(topped.updates) == len(plain.updates) > 0
    for (_, update), (_, plain_update) in zip(
        topped.updates, plain.updates, strict=True
    ):
        assert fingerprint(update) == fingerprint(plain_update)
    for client in CLIENTS:
        assert fingerprint(topped.memory[client]) == fingerprint(plain.memory[client])


@pytest.mark.parametrize("name", METHODS)
def test_flags_are_what_the_method_does(name: str) -> None:
    trainings: list[int] = []
    run = train(name, AS_IT_IS, on_trained=lambda steps, _: trainings.append(steps))
    queries = noisy(5, 0, seed=10).train.images
    trainings.clear()
    served = {
        client: personal(run, client, run.data["a"])(queries)
        for client in ("a", UNSEEN_CLIENT)
    }
    payloads = {
        fingerprint(run.method.broadcast(run.state, client, RandomKey(2).child(client)))
        for client in (*CLIENTS, UNSEEN_CLIENT)
    }
    is_global = False
    if hasattr(run.state, "weights"):
        of_all = run.task.probabilities(run.state.weights, queries)
        is_global = torch.equal(served[UNSEEN_CLIENT], of_all)
    infers = not trainings and len(payloads) == 1
    kind = METHODS[name]
    # A method that differs from what this run shows must state the flag in its class.
    for flag, observed in [
        ("ends_with_global_model", is_global),
        ("personalizes_by_inference", infers),
    ]:
        assert getattr(kind, flag) == observed or flag in vars(kind), flag
    assert kind.ends_with_global_model or not is_global
    assert infers or not kind.personalizes_by_inference
    assert kind.serves_global_model == (infers and is_global)


TOGETHER = [
    name
    for name in METHODS
    if METHODS[name].personalizes_by_inference
    and not PERSONALIZERS[METHODS[name].personalization].trains
]


@pytest.mark.parametrize("name", TOGETHER)
def test_together_clients_are_served_what_they_would_be_alone(name: str) -> None:
    run = train(name)
    payload = run.method.broadcast(run.state, "a", RandomKey(2))
    tests = {client: noisy(5, 0, seed=20).train.images for client in CLIENTS}

    def served(client: str) -> torch.Tensor:
        data, memory = run.data[client], run.memory.get(client)
        return run.method.personalize(payload, memory, data, RandomKey(3))(
            tests[client]
        )

    alone = [served(client) for client in CLIENTS]
    calls = count_embeddings(run.task)
    models = list(take_apart(payload).tensors.values())
    learnt = [run.data[client].train.images for client in CLIENTS]
    held_out = [run.data[client].validation.images for client in CLIENTS]
    with run.task.pool.holding(models, [*learnt, *held_out, *tests.values()]):
        together = [served(client) for client in CLIENTS]
        num_calls = len(calls)
        again = [served(client) for client in CLIENTS]
    assert len(calls) == num_calls
    # In every bit: the batches are the same, each computed once.
    assert all(map(torch.equal, together, alone))
    assert all(map(torch.equal, again, alone))


PARTICIPANTS = (("a", "b", "c"), ("c", "d", "e"), ("a", "b", "d"))
"""The clients of three rounds: some miss the first, some the second."""

KEEPING = [name for name in WITH_ROUNDS if METHODS[name].client_state != "0"]


def assert_finite(*records: Any) -> None:
    for record in records:
        parts = take_apart(record)
        for name, tensor in parts.tensors.items():
            assert is_finite(tensor), name
        json.loads(parts.structure, parse_constant=pytest.fail)


@pytest.mark.parametrize(("num_train", "labels"), [(1, 3), (2, 3), (6, 1)])
@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_client_with_little_to_learn_from_takes_part(
    name: str, num_train: int, labels: int
) -> None:
    run = trained(name)
    data, memory, state = noisy(num_train, 0, 9, labels=labels), None, run.before
    for server_round in (1, 2):
        memory, update = client_update(
            run.method, state, "a", data, memory, server_round
        )
        assert update.num_examples == num_train
        assert math.isfinite(update.train_loss)
        assert_finite(memory, update)
        if server_round == 1:
            state = run.method.aggregate(state, iter([("a", update), *run.updates[1:]]))
            assert_finite(state)


def rounds(
    method: Method, data: dict[str, ClientData], memory: dict[str, Any]
) -> Iterator[Any]:
    """Yield the server's state before each round; keep its participants' memory."""
    state = method.init(sorted(data), RandomKey(1))
    for server_round, names in enumerate(PARTICIPANTS, start=1):
        yield state
        updates = []
        for name in names:
            memory[name], update = client_update(
                method, state, name, data[name], memory.get(name), server_round
            )
            assert_finite(memory[name], update)
            updates.append((name, update))
        state = method.aggregate(state, iter(updates))
    yield state


def three_rounds(name: str) -> Method:
    """Build a method for the rounds of `PARTICIPANTS`."""
    training = replace(TRAINING, num_rounds=len(PARTICIPANTS))
    return build(METHODS[name], task_for(name, training))


FIVE_CLIENTS = {client: noisy(6 + i, 4, seed=i) for i, client in enumerate("abcde")}


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_part_of_the_clients_replies(name: str) -> None:
    memory = dict[str, Any]()
    for state in rounds(three_rounds(name), FIVE_CLIENTS, memory):
        assert_finite(state)
    assert sorted(memory) == list("abcde")


@pytest.mark.parametrize("name", KEEPING)
def test_a_client_that_missed_a_round_goes_on_with_what_it_kept(name: str) -> None:
    method, data, memory = three_rounds(name), FIVE_CLIENTS, dict[str, Any]()
    *_, last = itertools.islice(rounds(method, data, memory), len(PARTICIPANTS))
    updated, anew = (
        [*map(fingerprint, client_update(method, last, "a", data["a"], its, 3))]
        for its in (memory["a"], None)
    )
    assert updated != anew


LATER = MultiStepSchedule(milestones=(2,), factor=0.125)
"""An eighth of the rate from round 2 on, the last round."""


def at_three_rates(name: str) -> list[Method]:
    """Build a method with a constant rate, a schedule, and the later rate always."""
    proxy = noisy(7, 0, seed=2).train
    changes: list[dict[str, Any]] = [{}, {"schedule": LATER}, {"learning_rate": 0.0125}]
    tasks = [task_for(name, replace(TRAINING, **change)) for change in changes]
    return [build(METHODS[name], replace(task, proxy=lambda: proxy)) for task in tasks]


@pytest.mark.parametrize("name", sorted({*WITH_ROUNDS} - OF_STATISTICS))
def test_a_round_is_trained_at_its_own_rate(name: str) -> None:
    run = trained(name)
    payload = run.method.broadcast(run.state, "a", RandomKey(2))

    def second_round(method: Method) -> list[str]:
        arguments = (payload, run.memory["a"], run.data["a"], 2, RandomKey(3))
        return [fingerprint(part) for part in method.client_update(*arguments)]

    constant, scheduled, later = map(second_round, at_three_rates(name))
    assert scheduled == later
    assert scheduled != constant


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_unseen_client_trained_from_start_uses_first_rate(name: str) -> None:
    run, queries = trained(name), noisy(5, 0, seed=10).train.images
    payload = run.method.broadcast(run.state, UNSEEN_CLIENT, RandomKey(2))

    def served(method: Method) -> Tensor:
        return method.personalize(payload, None, run.data["a"], RandomKey(3))(queries)

    constant, scheduled, later = map(served, at_three_rates(name))
    uses_first_rate = torch.equal(scheduled, constant) and not torch.equal(
        scheduled, later
    )
    assert METHODS[name].trains_unseen_from_start == uses_first_rate


def has_representation(kind: type[Method]) -> bool:
    """Return whether a memory can be put on what the class serves."""
    served = get_type_hints(kind.personalize)["return"]
    return hasattr(served, "without_validation")


ON_TOP = [
    name
    for name, kind in PERSONALIZERS.items()
    if has_representation(kind) and kind.trains
]
BARE = [
    (name, None)
    for name, kind in METHODS.items()
    if kind.personalization == AS_IT_IS or kind.personalization in ON_TOP
]


def validation_splits() -> list[Examples]:
    """Return four splits: one, a longer one, that in another order, and none.

    The order of the examples changes training on them, but no choice by them.
    """
    other = noisy(0, 7, seed=99).validation
    turned = other.take(torch.arange(7).roll(1))
    return [noisy(0, 4, 0).validation, other, turned, noisy(0, 0, 1).validation]


@pytest.mark.parametrize("known_as", ["a", UNSEEN_CLIENT])
@pytest.mark.parametrize(
    ("name", "on_top"), BARE + [("fedavg", on_top) for on_top in ON_TOP]
)
def test_what_is_served_without_validation_has_not_seen_it(
    name: str, on_top: str | None, known_as: str
) -> None:
    run, queries = trained(name, on_top), noisy(5, 0, seed=10).train.images
    payload = run.method.broadcast(run.state, known_as, RandomKey(2))
    memory, train = run.memory.get(known_as), run.data["a"].train
    chosen, alone = [], []
    for validation in validation_splits():
        data = ClientData(train, validation)
        served = run.method.personalize(payload, memory, data, RandomKey(3))
        assert isinstance(served, EmbeddingPredictor)
        chosen.append(served.describe())
        alone.append(served.without_validation())
    kind = METHODS[name] if on_top is None else PERSONALIZERS[on_top]
    chooses = kind.chooses_on_validation
    assert not chooses or chosen[1] == chosen[2]
    for first, second in itertools.combinations(range(len(alone)), 2):
        if chooses and chosen[first] != chosen[second]:
            continue
        assert alone[first].describe() == alone[second].describe()
        assert torch.equal(alone[first](queries), alone[second](queries))


@pytest.mark.parametrize("known_as", ["a", UNSEEN_CLIENT])
@pytest.mark.parametrize("name", [name for name, _ in BARE])
def test_validation_split_is_learned_from_where_stated(
    name: str, known_as: str
) -> None:
    run, queries = trained(name), noisy(5, 0, seed=10).train.images
    served = personal(run, known_as, noisy(9, 5, seed=5))
    assert isinstance(served, EmbeddingPredictor)
    learned = not torch.equal(served(queries), served.without_validation()(queries))
    expected = ("all", "unseen" if known_as == UNSEEN_CLIENT else "seen")
    assert (METHODS[name].learns_from_validation in expected) == learned


@pytest.mark.parametrize(
    "name", [name for name in METHODS if METHODS[name].ends_with_global_model]
)
def test_an_unseen_client_is_sent_the_model_that_is_exported(name: str) -> None:
    run = trained(name)
    payload = run.method.broadcast(run.state, UNSEEN_CLIENT, RandomKey(2))
    assert torch.equal(payload.weights, run.state.weights)
    assert METHODS[name].reference_title is not None


OF_A_ROUND = ("a", "b", "c", "d")
EXAMPLES = dict.fromkeys(OF_A_ROUND, 6)
OF_A_MODEL = {"weights", "shared", "components", "models"}


@pytest.fixture
def method(request: pytest.FixtureRequest) -> Method:
    spec = METHODS[request.param]
    return spec(task_for(spec.name, TRAINING), spec.settings_type())


def longer(update: Any) -> Iterator[Any]:
    """Yield the update with each of its tensors longer by one."""
    parts = take_apart(update)
    for name, tensor in parts.tensors.items():
        wrong = torch.cat([tensor.reshape(-1), torch.zeros(1)])
        tensors = {**parts.tensors, name: wrong}
        yield put_together(type(update), Parts(tensors, parts.structure))


def of_other_lengths(update: Any) -> Iterator[Any]:
    """Yield the update with other numbers of tensors in each of its tuples."""
    for field in dataclasses.fields(update):
        value = getattr(update, field.name)
        if isinstance(value, tuple):
            for wrong in ((), value[:-1], (*value, value[0])):
                yield dataclasses.replace(update, **{field.name: wrong})


def checks_of(method: Method, state: Any) -> UpdateChecks:
    """Return the checks of a round in which every client was sent its payload."""
    checks = UpdateChecks(
        EXAMPLES,
        method.update_type,
        math.inf,
        method.update_problem,
        method.started_from,
    )
    for client in OF_A_ROUND:
        payload = method.broadcast(state, client, RandomKey(1).child(client))
        checks.note_sent(client, payload)
    return checks


def honest_updates(method: Method, state: Any) -> dict[str, Any]:
    """Return every client's update in the first round."""
    return {
        client: client_update(method, state, client, noisy(6, 4, seed=number))[1]
        for number, client in enumerate(OF_A_ROUND)
    }


def usable(
    updates: dict[str, Any], checks: UpdateChecks
) -> tuple[list[tuple[str, Any]], dict[str, str]]:
    """Return the usable updates, and the reasons of the others, by client."""
    replies = [Reply((client,), update) for client, update in updates.items()]
    failures: dict[str, str] = {}
    measured = checks.usable(replies, failures.__setitem__)
    used = [(reply.client, reply.update) for reply in measured if reply is not None]
    return used, failures


@pytest.mark.parametrize("method", WITH_ROUNDS, indirect=True)
def test_a_wrong_first_update_is_that_client_s_failure(method: Method) -> None:
    state = method.init(OF_A_ROUND, RandomKey(1))
    honest = honest_updates(method, state)
    first = honest["a"]
    wrong_ones = [*longer(first), *of_other_lengths(first)]
    assert wrong_ones
    for wrong in wrong_ones:
        used, failures = usable(honest | {"a": wrong}, checks_of(method, state))
        assert [client for client, _ in used] == ["b", "c", "d"], wrong
        assert list(failures) == ["a"]
        method.aggregate(state, iter(used))


def extra_numbers(kind: type[Method]) -> dict[str, type]:
    """Return the types of an update's numbers other than those of every update."""
    hints = get_type_hints(kind.update_type)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(kind.update_type)
        if hints[field.name] in (int, float)
        and field.name not in ("num_examples", "train_loss")
    }


EXTREME_NUMBERS = {int: (-1, 10**9), float: (-1.0, 1e9, math.inf, math.nan)}


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        (name, field, value)
        for name in WITH_ROUNDS
        for field, kind in extra_numbers(METHODS[name]).items()
        for value in EXTREME_NUMBERS[kind]
    ],
    indirect=["method"],
)
def test_extreme_number_in_update_is_refused_or_bounded(
    method: Method, field: str, value: float
) -> None:
    state = method.init(OF_A_ROUND, RandomKey(1))
    honest = honest_updates(method, state)
    extreme = dataclasses.replace(honest["a"], **{field: value})
    used, failures = usable(honest | {"a": extreme}, checks_of(method, state))
    after = method.aggregate(state, iter(used))
    if failures:
        assert list(failures) == ["a"]
        assert [client for client, _ in used] == ["b", "c", "d"]
        return
    # An accepted number may shift weight between clients, but must leave each tensor
    # between those that the clients would make alone, with their honest numbers.
    alone: dict[str, list[Tensor]] = {}
    for pair in honest.items():
        made = take_apart(method.aggregate(state, iter([pair])))
        for path, tensor in made.tensors.items():
            alone.setdefault(path.partition("/")[0], []).append(tensor)
    assert_finite(after)
    for path, tensor in take_apart(after).tensors.items():
        each = torch.stack(alone[path.partition("/")[0]])
        assert bool((tensor >= each.amin(dim=0) - 1e-6).all()), path
        assert bool((tensor <= each.amax(dim=0) + 1e-6).all()), path


SENDING_MODELS = [
    name
    for name in WITH_ROUNDS
    if OF_A_MODEL
    & {field.name for field in dataclasses.fields(METHODS[name].update_type)}
]


@pytest.mark.parametrize("method", SENDING_MODELS, indirect=True)
def test_how_far_a_client_moves_is_measured_from_what_it_was_sent(
    method: Method,
) -> None:
    state = method.init(OF_A_ROUND, RandomKey(1))
    honest, checks = honest_updates(method, state), checks_of(method, state)
    replies = [Reply((client,), update) for client, update in honest.items()]
    usable_updates = list(checks.usable(replies, lambda client, why: pytest.fail(why)))
    assert usable_updates
    for reply in usable_updates:
        assert reply is not None
        fields = [name for name in reply.changes if name in OF_A_MODEL]
        assert fields
        for name in fields:
            # A step moves a model by a part of its length.
            assert 0 <= reply.changes[name].norm < reply.changes[name].sent


@pytest.mark.parametrize("method", ["fedattn"], indirect=True)
def test_an_update_without_what_may_be_missing_does_not_decide_for_others(
    method: Method,
) -> None:
    state = method.init(OF_A_ROUND, RandomKey(1))
    honest = honest_updates(method, state)
    honest["a"] = dataclasses.replace(honest["a"], representation=None)
    used, _ = usable(honest, checks_of(method, state))
    assert [client for client, _ in used] == list(OF_A_ROUND)
    assert method.aggregate(state, iter(used)).known.names == ("b", "c", "d")
