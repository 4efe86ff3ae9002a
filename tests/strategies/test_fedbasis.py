"""FedBasis on two parameters, with one basis, warm start and model distribution."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from knnper.data.examples import InputSpec
from knnper.errors import RunError
from knnper.experiment import Choice, MultiStepSchedule, TrainingSettings
from knnper.models import MlpSettings
from knnper.records import fingerprint
from knnper.seeding import RandomKey
from knnper.strategies.catalogue import build_task
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.core.task import Task
from knnper.strategies.fedbasis import (
    Bases,
    BasesState,
    BasesUpdate,
    FedBasis,
    FedBasisSettings,
    layers,
    local_round,
    num_warm_rounds,
)
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
    white,
)

TWO = FedBasisSettings(
    num_bases=2,
    major_basis=False,
    blocks="whole",
    temperature=0.5,
    combination_learning_rate=10.0,
    combination_epochs=1,
    warm_start_fraction=0.0,
    unseen_epochs=1,
    personal_classifier=False,
)
FAR = Bases((torch.tensor([1.0, -1.0]), torch.tensor([0.0, 0.0])))
ONE = FedBasisSettings(num_bases=1, major_basis=False, personal_classifier=False)
WITH_EVERYTHING = TrainingSettings(
    num_rounds=4, batch_size=3, learning_rate=0.1, momentum=0.5, weight_decay=0.01
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def psi_after_a_step() -> float:
    """Return ψ_1 = -ψ_2 after a step of rate 10 on (x, y) = (1, 0), by hand.

    θ = ½ (1, -1) + ½ (0, 0) = (½, -½), so g = (-q, q) with q = 1 - σ(1), and the
    products with the bases are -2q and 0. Softmax from (½, ½) gives the gradient
    ½ (-2q - ½ (-2q)) = -½ q for ψ_1, and ½ q for ψ_2.
    """
    return 10 * (1 - sigmoid(1.0)) / 2


def a_round(
    settings: FedBasisSettings, payload: Bases = FAR, **training: Any
) -> tuple[Tensor, BasesUpdate]:
    """Return α and the update of a client with one example, of label 0, at rate 1."""
    task, data = linear_task(**training), white([0]).train
    return local_round(task, settings, payload, data, learning_rate=1.0, rng=KEY)


def test_coordinate_descent_by_hand() -> None:
    alpha, update = a_round(TWO)
    difference = 2 * psi_after_a_step()
    assert alpha.flatten().tolist() == pytest.approx(
        [sigmoid(difference), sigmoid(-difference)], abs=1e-6
    )
    # With τ = ½, α† = σ(±2 · difference): θ = α†_1 (1, -1), q = 1 - σ(2 α†_1), and
    # v_k ← v_k + α†_k q (1, -1).
    first, second = sigmoid(2 * difference), sigmoid(-2 * difference)
    wrong = 1 - sigmoid(2 * first)
    found = torch.stack(update.models)[:, 0].tolist()
    assert found == pytest.approx([1 + first * wrong, second * wrong], abs=1e-6)
    assert update.train_loss == pytest.approx(-math.log(1 - wrong), abs=1e-6)


def test_the_combination_is_trained_for_its_epochs() -> None:
    alpha, _ = a_round(replace(TWO, combination_epochs=2))
    # After the first pass θ = α_1 (1, -1), and the gradient of ψ_1 is
    # α_1 (1 - α_1) (-2 q) with q = 1 - σ(2 α_1).
    psi = psi_after_a_step()
    first = sigmoid(2 * psi)
    psi += 10 * first * (1 - first) * 2 * (1 - sigmoid(2 * first))
    assert float(alpha[0, 0]) == pytest.approx(sigmoid(2 * psi), abs=1e-6)


@pytest.mark.parametrize(
    ("num_epochs", "expected"), [(1, 0.5), (2, 0.5 + 1 - 0.7310586)]
)
def test_a_head_is_trained_for_its_epochs_at_the_first_rate(
    num_epochs: int, expected: float
) -> None:
    training = TrainingSettings(
        num_rounds=4, learning_rate=1.0, schedule=MultiStepSchedule((3,))
    )
    settings = replace(ONE, personal_classifier=True, unseen_epochs=num_epochs)
    method = FedBasis(linear_task(training), settings)
    assert training.learning_rate_at(4) < 0.5
    payload = Bases((torch.zeros(2),))
    served = one_model_of(method, payload, None, white([0]))
    # A step of ½, and one of 1 - σ(1).
    assert served.weights.tolist() == pytest.approx([expected, -expected], abs=1e-6)


def test_the_baseline_by_hand() -> None:
    alpha, update = a_round(replace(TWO, coordinate_descent=False, temperature=1.0))
    # Both from the gradient at θ = (½, -½): α as above, and both bases by ½ q.
    assert float(alpha[0, 0]) == pytest.approx(sigmoid(2 * psi_after_a_step()))
    wrong = 1 - sigmoid(1.0)
    found = torch.stack(update.models)[:, 0].tolist()
    assert found == pytest.approx([1 + wrong / 2, wrong / 2], abs=1e-6)


def test_sharpening_stands_in_the_gradient_of_the_baseline() -> None:
    settings = replace(TWO, coordinate_descent=False, temperature=1e-3)
    _, update = a_round(settings, local_steps=2)
    # The second step, with α† = (1, 0), no longer moves the second basis.
    assert float(update.models[1][0]) == pytest.approx((1 - sigmoid(1.0)) / 2)
    assert float(update.models[0][0]) > 1 + (1 - sigmoid(1.0)) / 2


def test_half_of_the_model_is_the_major_basis() -> None:
    payload = Bases((torch.tensor([2.0, -2.0]), *FAR.models))
    alpha, update = a_round(replace(TWO, major_basis=True), payload)
    # θ = ½ (2, -2) + ¼ (1, -1) = (1¼, -1¼), q = 1 - σ(2½); the products with the bases
    # are half of -2q and 0, for ψ_1 then ¼ of them.
    psi = 10 * (1 - sigmoid(2.5)) / 4
    assert alpha.shape == (2, 1)
    assert float(alpha[0, 0]) == pytest.approx(sigmoid(2 * psi), abs=1e-6)
    sharp = sigmoid(4 * psi)
    wrong = 1 - sigmoid(2 * (1 + sharp / 2))
    expected = [2 + wrong / 2, 1 + sharp * wrong / 2, (1 - sharp) * wrong / 2]
    found = torch.stack(update.models)[:, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-6)


def test_the_server_averages_each_basis() -> None:
    method = FedBasis(linear_task(), TWO)
    state = BasesState(FAR.models, num_rounds=3, seed=1)
    updates = [
        (str(n), BasesUpdate((torch.full((2,), v), torch.full((2,), -v)), n, 0.5))
        for n, v in [(1, 4.0), (3, 8.0)]
    ]
    # (1 · 4 + 3 · 8) / 4 = 7
    new_state = method.aggregate(state, iter(updates))
    assert [model.tolist() for model in new_state.models] == [[7, 7], [-7, -7]]
    assert (new_state.num_rounds, new_state.seed) == (4, 1)


def trained() -> tuple[Task, BasesState]:
    """Return a task, and the bases after two rounds of the default FedBasis."""
    task = normed_task(replace(WITH_EVERYTHING, weight_decay=0.0))
    clients = {name: noisy(8, 0, seed=i, labels=1 + i) for i, name in enumerate("abc")}
    method = FedBasis(task, FedBasisSettings())
    state, _ = run_rounds(method, clients, num_rounds=2)
    return task, state


def convex(task: Task, models: tuple[Tensor, ...], alpha: list[float]) -> Tensor:
    """Return ½ v' + ½ Σ α_k v_k."""
    major, *bases = models
    mixed = sum(share * basis for share, basis in zip(alpha, bases, strict=True))
    return major / 2 + mixed / 2


def test_a_client_is_served_a_combination_and_its_own_head() -> None:
    task, state = trained()
    settings = FedBasisSettings(combination_learning_rate=5.0)
    method, data = FedBasis(task, settings), noisy(9, 3, seed=7)
    seen = method.broadcast(state, "a", KEY)
    unseen = method.broadcast(state, UNSEEN_CLIENT, KEY)
    assert all(map(torch.equal, seen.models, unseen.models))
    served = one_model_of(method, unseen, None, data)
    alpha = list(served.describe().values())
    assert list(served.describe()) == [f"combination_{k}" for k in range(3)]
    assert sum(alpha) == pytest.approx(1.0)
    assert max(alpha) - min(alpha) > 0.01
    # The convolution and its normalisation are one block.
    expected = convex(task, state.models, alpha)
    number = task.model.num_parameters
    head = task.head_mask[:number]
    found = served.weights[:number]
    torch.testing.assert_close(found[~head], expected[:number][~head])
    assert not torch.allclose(found[head], expected[:number][head], atol=1e-3)


def test_without_a_personal_classifier_the_head_is_combined_too() -> None:
    task, state = trained()
    settings = FedBasisSettings(blocks="whole", personal_classifier=False)
    method, payload = FedBasis(task, settings), Bases(state.models)
    served = one_model_of(method, payload, None, noisy(9, 3, seed=7))
    expected = convex(task, state.models, list(served.describe().values()))
    number = task.model.num_parameters
    torch.testing.assert_close(served.weights[:number], expected[:number])


def test_a_client_without_data_is_served_the_uniform_combination() -> None:
    task, state = trained()
    method, payload = FedBasis(task, FedBasisSettings()), Bases(state.models)
    served = one_model_of(method, payload, None, noisy(0, 0, seed=1))
    torch.testing.assert_close(served.weights, convex(task, state.models, [1 / 3] * 3))
    assert served.describe() == pytest.approx(dict.fromkeys(served.describe(), 1 / 3))


def test_blocks_have_combinations_of_their_own() -> None:
    task, state = trained()
    data, payload = noisy(9, 0, seed=7).train, Bases(state.models)
    alpha, _ = local_round(task, FedBasisSettings(), payload, data, 0.1, KEY)
    assert alpha.shape == (3, layers(task.model).num_blocks) == (3, 2)
    assert not torch.equal(alpha[:, 0], alpha[:, 1])
    whole = FedBasisSettings(blocks="whole")
    alpha, _ = local_round(task, whole, payload, data, 0.1, KEY)
    assert alpha.shape == (3, 1)


@pytest.mark.parametrize(
    ("blocks", "num_blocks"), [("layers", 4), ("stages", 2), ("whole", 1)]
)
def test_what_a_block_is_can_be_chosen(blocks: Any, num_blocks: int) -> None:
    task = build_task(
        Choice("mlp", MlpSettings(hidden_sizes=(4, 4, 4))),
        TrainingSettings(),
        InputSpec((2, 2, 1), num_classes=3, mean=(0.5,), std=(0.25,)),
        KEY,
        evaluation_batch_size=16,
    )
    payload = Bases(tuple(task.fresh_weights(KEY.child(k)) for k in range(3)))
    settings = FedBasisSettings(num_bases=2, blocks=blocks)
    alpha, _ = local_round(task, settings, payload, noisy(5, 0, 1).train, 0.1, KEY)
    assert alpha.shape == (2, num_blocks)


WARM = FedBasisSettings(num_bases=2, major_basis=False, blocks="whole")


def test_the_warm_start_by_hand() -> None:
    task = linear_task(num_rounds=3, learning_rate=1.0)
    settings = replace(WARM, major_basis=True)
    clients = {"a": white([0, 0]), "b": white([0]), "c": white([1])}
    state, _ = run_rounds(FedBasis(task, settings), clients, num_rounds=1)
    # From 0, a and b step to (½, -½) and c to (-½, ½): two clusters, whose means are
    # these; the major basis is that of all, ¾ · ½ - ¼ · ½ = ¼.
    major, *bases = [model.tolist() for model in state.models]
    assert major == [0.25, -0.25]
    assert sorted(bases) == [[-0.5, 0.5], [0.5, -0.5]]


def test_the_warm_start_is_fedavg() -> None:
    task = normed_task(replace(WITH_EVERYTHING, num_rounds=6))
    settings = FedBasisSettings(num_bases=2, warm_start_fraction=0.5)
    clients = {name: noisy(5 + i, 0, seed=i) for i, name in enumerate("abc")}
    assert num_warm_rounds(task, settings) == 3
    for num_rounds in (2, 3):
        plain, _ = run_rounds(of_name("fedavg", task), clients, num_rounds)
        state, _ = run_rounds(FedBasis(task, settings), clients, num_rounds)
        assert torch.equal(state.models[0], plain.weights)
        assert len(state.models) == (1 if num_rounds == 2 else 3)
    after, _ = run_rounds(FedBasis(task, settings), clients, num_rounds=4)
    assert len(after.models) == 3
    assert not torch.equal(after.models[1], after.models[2])


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 0), (0.001, 1), (0.24, 1), (0.5, 3)]
)
def test_a_warm_start_is_a_round_at_least(fraction: float, expected: int) -> None:
    task = linear_task(num_rounds=6)
    settings = replace(WARM, warm_start_fraction=fraction)
    assert num_warm_rounds(task, settings) == expected


def test_the_warm_start_goes_on_while_too_few_reply() -> None:
    task = linear_task(num_rounds=10)
    method = FedBasis(task, WARM)
    state = method.init(["a", "b"], RandomKey(0))

    def update(value: float) -> BasesUpdate:
        return BasesUpdate((torch.full((2,), value),), 1, 0.5)

    for server_round in range(1, 5):
        state = method.aggregate(state, iter([("a", update(server_round))]))
        assert [model.tolist() for model in state.models] == [[server_round] * 2]
    both = [("a", update(1.0)), ("b", update(3.0))]
    state = method.aggregate(state, iter(both))
    assert sorted(model.tolist() for model in state.models) == [[1, 1], [3, 3]]


@pytest.mark.parametrize("seed", range(8))
def test_the_first_bases_do_not_depend_on_the_order_of_replies(seed: int) -> None:
    task = linear_task(num_rounds=1)
    method = FedBasis(task, FedBasisSettings(num_bases=3))
    # Points at even distances, which k-means divides as its first centre has it.
    models = [torch.tensor([float(at), 0.1 * at**2]) for at in range(9)]
    updates = [
        (f"client {at}", BasesUpdate((model,), 1 + at % 4, 0.5))
        for at, model in enumerate(models)
    ]
    start = method.init([client for client, _ in updates], RandomKey(seed))
    expected = fingerprint(method.aggregate(start, iter(updates)))
    shuffled = updates[::2] + updates[1::2]
    for others in (updates[::-1], shuffled):
        assert fingerprint(method.aggregate(start, iter(others))) == expected


@pytest.mark.parametrize(("num_clients", "fits"), [(4, False), (5, True)])
def test_more_bases_than_replies_are_refused(num_clients: int, fits: bool) -> None:
    task = linear_task(participation=0.5)
    method = FedBasis(task, FedBasisSettings(num_bases=3))
    names = [str(number) for number in range(num_clients)]
    if fits:
        assert len(method.init(names, RandomKey(0)).models) == 1
        return
    with pytest.raises(RunError, match=r"found 4 clients of which 0\.5 take part"):
        method.init(names, RandomKey(0))
    without = FedBasis(task, FedBasisSettings(num_bases=3, warm_start_fraction=0.0))
    assert len(without.init(names, RandomKey(0)).models) == 4


def test_without_a_warm_start_the_bases_are_drawn() -> None:
    task = normed_task()
    settings = FedBasisSettings(num_bases=2, warm_start_fraction=0.0)
    first, second, third = FedBasis(task, settings).init([], RandomKey(0)).models
    assert torch.equal(first, task.initial_weights)
    assert not torch.equal(second, first)
    assert not torch.equal(third, second)
