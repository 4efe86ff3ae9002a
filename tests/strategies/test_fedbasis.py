"""FedBasis by hand: blocks, bases found again from their combination, rounds."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from knnper.data.examples import ClientData, InputSpec
from knnper.errors import RunError
from knnper.experiment import MultiStepSchedule, TrainingSettings
from knnper.flat_model import FlatModel
from knnper.networks import (
    Mlp,
    MlpSettings,
    MobileNetV2,
    MobileNetV2Settings,
    ResNet18,
    ResNet18Settings,
)
from knnper.records import fingerprint
from knnper.seeding import RandomKey
from knnper.settings import Choice
from knnper.strategies.core.assembly import build_task
from knnper.strategies.core.blocks import Blocks, layers, stages, whole_model
from knnper.strategies.core.kmeans import clusters
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import mini_batches
from knnper.strategies.fedbasis import (
    Bases,
    BasesState,
    BasesUpdate,
    Combination,
    FedBasis,
    FedBasisSettings,
    clustered,
    local_round,
    num_warm_rounds,
    train_bases,
    train_jointly,
)
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
    sigmoid,
    white,
)

ROW = InputSpec((1, 1, 3), num_classes=2, mean=(0.0,) * 3, std=(1.0,) * 3)

COLOR = InputSpec((32, 32, 3), num_classes=2, mean=(0.5,) * 3, std=(0.25,) * 3)

TRAINING = TrainingSettings(batch_size=4, local_steps=7)

DECAYING = TrainingSettings(
    batch_size=4, local_steps=7, momentum=0.9, weight_decay=0.05
)

RATE = 0.2


def blocks_by_name(model: FlatModel, blocks: Blocks) -> dict[str, int]:
    return {entry.name: int(blocks.of_weight[entry.start]) for entry in model.entries}


def test_a_layer_is_a_block_with_its_normalisation() -> None:
    model = FlatModel(Mlp(MlpSettings(hidden_sizes=(8, 16), norm="group"), ROW))
    blocks = blocks_by_name(model, layers(model))
    assert blocks == {
        "features.1.weight": 0,
        "features.1.bias": 0,
        "features.2.weight": 0,
        "features.2.bias": 0,
        "features.4.weight": 1,
        "features.4.bias": 1,
        "features.5.weight": 1,
        "features.5.bias": 1,
        "classifier.weight": 2,
        "classifier.bias": 2,
    }
    assert layers(model).num_blocks == 3
    assert whole_model(model).num_blocks == 1


def test_a_residual_block_is_one_block() -> None:
    model = FlatModel(MobileNetV2(MobileNetV2Settings(), COLOR))
    blocks = layers(model)
    # The stem, 17 inverted residuals, the last convolution, and the head.
    assert blocks.num_blocks == 20
    for name, block in blocks_by_name(model, blocks).items():
        place = int(name.split(".")[1])
        assert block == (19 if name.startswith("classifier") else place)


def test_the_stages_of_a_resnet_are_its_four_blocks_and_the_head() -> None:
    model = FlatModel(ResNet18(ResNet18Settings(), COLOR))
    blocks = stages(model)
    assert blocks.num_blocks == 5
    assert layers(model).num_blocks == 10
    of_stage = {"layer1": 0, "layer2": 1, "layer3": 2, "layer4": 3, "classifier": 4}
    # The stem goes with the block that follows it.
    of_stage |= {"conv1": 0, "bn1": 0}
    for name, block in blocks_by_name(model, blocks).items():
        assert block == of_stage[name.split(".")[0]]


def test_what_lies_in_no_stage_or_layer_is_a_block() -> None:
    module = Mlp(MlpSettings(hidden_sizes=(8, 16)), ROW)
    module.scale = nn.Parameter(torch.ones(2))
    module.last = nn.Linear(2, 2)
    model = FlatModel(module)
    of_stages = blocks_by_name(model, stages(model))
    of_layers = blocks_by_name(model, layers(model))
    for name, stage, layer in (
        ("scale", 0, 0),
        ("features.1.weight", 1, 1),
        ("features.3.weight", 1, 2),
        ("last.weight", 2, 3),
        ("classifier.bias", 3, 4),
    ):
        assert (of_stages[name], of_layers[name]) == (stage, layer), name


def test_sums_and_spread_follow_the_blocks() -> None:
    blocks = Blocks(torch.tensor([1, 1, 0, 2, 2, 0]))
    products = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [1.0] * 6])
    assert blocks.sums(products).tolist() == [[36.0, 3.0, 24.0], [2.0, 2.0, 2.0]]
    values = torch.tensor([5.0, 6.0, 7.0])
    assert blocks.spread(values).tolist() == [6.0, 6.0, 5.0, 7.0, 7.0, 5.0]
    models = torch.stack([torch.ones(6), torch.zeros(6)])
    shares = torch.tensor([[0.25, 0.5, 1.0], [0.75, 0.5, 0.0]])
    expected = [0.5, 0.5, 0.25, 1.0, 1.0, 0.25]
    assert blocks.combine(models, shares).tolist() == expected


def unequal(task: Task, *, has_major: bool) -> Combination:
    """Return a combination of random models that is different in each block."""
    key = RandomKey(5)
    models = torch.stack([task.fresh_weights(key.child(k)) for k in range(3)])
    combination = Combination(models, layers(task.model), has_major, 1.0)
    num_bases = 3 - has_major
    combination.step(torch.linspace(-2.0, 3.0, 6).view(3, 2).flip(0))
    assert combination.alpha().shape == (num_bases, 2)
    return combination


def by_brute_force(
    task: Task, combination: Combination, data: ClientData, temperature: float
) -> Tensor:
    """Return all bases' parameters after SGD on each, by differentiating through θ."""
    training, model = task.training, task.model
    number = model.num_parameters
    bases = nn.Parameter(combination.models.clone())
    shares = combination.blocks.spread(combination.shares(temperature))
    rest = (training.momentum, 0.0, training.weight_decay)
    optimizer = torch.optim.SGD([bases], RATE, *rest)
    order = mini_batches(len(data.train), training.batch_size, RandomKey(2))
    model.module.train()
    for _ in range(training.local_steps or 0):
        batch = data.train.take(next(order))
        tensors = model.named((shares * bases).sum(dim=0))
        for entry in model.entries:
            if not entry.is_parameter:
                tensors[entry.name] = tensors[entry.name].detach()
        inputs = task.normalize(batch.images)
        logits = functional_call(model.module, tensors, (inputs,))
        loss = functional.cross_entropy(logits, batch.labels)
        (bases.grad,) = torch.autograd.grad(loss, bases)
        optimizer.step()
    return bases.detach()[:, :number]


@pytest.mark.parametrize("has_major", [False, True])
@pytest.mark.parametrize("training", [TRAINING, DECAYING])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_bases_are_those_of_training_each(
    training: TrainingSettings, has_major: bool, temperature: float
) -> None:
    task, data = normed_task(training), noisy(9, 0, seed=4)
    combination = unequal(task, has_major=has_major)
    arguments = (task, combination, temperature, data.train, RATE, RandomKey(2))
    bases, result = train_bases(*arguments)
    expected = by_brute_force(task, combination, data, temperature)
    number = task.model.num_parameters
    assert not torch.allclose(expected, combination.models[:, :number], atol=1e-2)
    torch.testing.assert_close(bases[:, :number], expected, rtol=1e-4, atol=1e-5)
    # All have the running statistics of the model that was trained.
    for model in bases:
        assert torch.equal(model[number:], result.weights[number:])


def test_jointly_the_bases_move_alike_where_the_combination_stays() -> None:
    task, data = normed_task(DECAYING), noisy(9, 0, seed=4)
    fresh = unequal(task, has_major=True).models
    uniform = Combination(fresh, layers(task.model), True, learning_rate=0.0)
    arguments = (task, uniform, 1.0, data.train, RATE, RandomKey(2))
    jointly, _ = train_jointly(*arguments)
    frozen, _ = train_bases(*arguments)
    torch.testing.assert_close(jointly, frozen, rtol=1e-4, atol=1e-5)


def test_a_basis_without_a_share_stays() -> None:
    task, data = normed_task(TRAINING), noisy(9, 0, seed=4)
    combination = unequal(task, has_major=False)
    shares = combination.shares(1e-4)
    assert sorted(shares.flatten().tolist()) == [0.0] * 4 + [1.0] * 2
    bases, _ = train_bases(task, combination, 1e-4, data.train, RATE, RandomKey(2))
    stays = combination.blocks.spread(shares) == 0
    stays[:, task.model.num_parameters :] = False
    assert torch.equal(bases[stays], combination.models[stays])


def update(*values: float, num_examples: int = 1) -> BasesUpdate:
    return BasesUpdate((torch.tensor(values),), num_examples, 0.5)


def test_buffers_are_averaged_and_not_compared() -> None:
    # Two parameters and a buffer, which alone would pair the first with the third.
    updates = [
        update(0.0, 0.0, 900.0),
        update(0.0, 1.0, -900.0, num_examples=3),
        update(9.0, 9.0, 900.0),
    ]
    center = torch.tensor([3.0, 3.0])
    centers = clustered(updates, center, 2, RandomKey(0))
    assert sorted(mean.tolist() for mean in centers) == [[0, 0.75, -450], [9, 9, 900]]


@pytest.mark.parametrize("seed", range(5))
def test_groups_far_apart_are_found(seed: int) -> None:
    points = torch.tensor([[0.0, 0], [9, 9], [0, 1], [9, 8], [-9, 5], [8, 9]])
    labels = clusters(points, 3, RandomKey(seed)).tolist()
    groups = {tuple(i for i in range(6) if labels[i] == k) for k in range(3)}
    assert groups == {(0, 2), (1, 3, 5), (4,)}


@pytest.mark.parametrize("seed", range(2))
def test_every_point_is_with_the_nearest_mean(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(30, 3, generator=generator)
    labels = clusters(points, 4, RandomKey(seed))
    means = torch.stack([points[labels == k].mean(dim=0) for k in range(4)])
    assert torch.equal(torch.cdist(points, means).argmin(dim=1), labels)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 5.0]), min_size=1, max_size=8),
    count=st.integers(1, 8),
    seed=st.integers(0, 5),
)
def test_no_cluster_is_empty(values: list[float], count: int, seed: int) -> None:
    points, count = torch.tensor(values)[:, None], min(count, len(values))
    labels = clusters(points, count, RandomKey(seed))
    assert sorted(set(labels.tolist())) == list(range(count))
    assert torch.equal(labels, clusters(points, count, RandomKey(seed)))


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
    first_weights = torch.stack(update.models)[:, 0].tolist()
    assert first_weights == pytest.approx([1 + first * wrong, second * wrong], abs=1e-6)
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
    first_weights = torch.stack(update.models)[:, 0].tolist()
    assert first_weights == pytest.approx([1 + wrong / 2, wrong / 2], abs=1e-6)


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
    first_weights = torch.stack(update.models)[:, 0].tolist()
    assert first_weights == pytest.approx(expected, abs=1e-6)


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
    body = served.weights[:number]
    torch.testing.assert_close(body[~head], expected[:number][~head])
    assert not torch.allclose(body[head], expected[:number][head], atol=1e-3)


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
    assert len(set(alpha[0].tolist())) == num_blocks


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


@pytest.mark.parametrize("seed", range(3))
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
    with pytest.raises(RunError, match=r"found 4 clients with a participation of 0\.5"):
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


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 0), (0.001, 1), (0.24, 1), (0.5, 3)]
)
def test_a_warm_start_is_a_round_at_least(fraction: float, expected: int) -> None:
    task = linear_task(num_rounds=6)
    settings = replace(WARM, warm_start_fraction=fraction)
    assert num_warm_rounds(task, settings) == expected
