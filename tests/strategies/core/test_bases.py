"""Blocks of a model, bases found again from their combination, clusters of points."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from knnper.data.examples import ClientData, InputSpec
from knnper.experiment import TrainingSettings
from knnper.models import (
    FlatModel,
    Mlp,
    MlpSettings,
    MobileNetV2,
    MobileNetV2Settings,
    ResNet18,
    ResNet18Settings,
)
from knnper.seeding import RandomKey
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import mini_batches
from knnper.strategies.fedbasis import (
    BasesUpdate,
    Blocks,
    Combination,
    clustered,
    clusters,
    kept_by_decay,
    layers,
    learn_combination,
    mean_models,
    stages,
    train_bases,
    train_jointly,
    whole_model,
)
from tests.strategies.tiny import noisy, normed_task

ROW = InputSpec((1, 1, 3), num_classes=2, mean=(0.0,) * 3, std=(1.0,) * 3)
COLOR = InputSpec((32, 32, 3), num_classes=2, mean=(0.5,) * 3, std=(0.25,) * 3)
TRAINING = TrainingSettings(batch_size=4, local_steps=7)
WITH_EVERYTHING = TrainingSettings(
    batch_size=4, local_steps=7, momentum=0.9, weight_decay=0.05
)
RATE = 0.2


def blocks_by_name(model: FlatModel, blocks: Blocks) -> dict[str, int]:
    return {entry.name: int(blocks.of_weight[entry.start]) for entry in model.entries}


def test_a_layer_is_a_block_with_its_normalisation() -> None:
    model = FlatModel(Mlp(MlpSettings(hidden_sizes=(8, 16), norm="group"), ROW))
    found = blocks_by_name(model, layers(model))
    assert found == {
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


def test_what_lies_in_no_stage_is_a_block() -> None:
    module = Mlp(MlpSettings(hidden_sizes=(8, 16)), ROW)
    module.scale = nn.Parameter(torch.ones(2))
    module.last = nn.Linear(2, 2)
    model = FlatModel(module)
    found = blocks_by_name(model, stages(model))
    assert found["scale"] == 0
    assert found["features.1.weight"] == found["features.3.weight"] == 1
    assert found["last.weight"] == 2
    assert found["classifier.bias"] == 3


def test_what_lies_in_no_layer_is_a_block() -> None:
    module = Mlp(MlpSettings(hidden_sizes=(8,)), ROW)
    module.scale = nn.Parameter(torch.ones(2))
    model = FlatModel(module)
    found = blocks_by_name(model, layers(model))
    assert found["scale"] == 0
    assert found["features.1.weight"] == 1
    assert found["classifier.bias"] == 2


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


@pytest.mark.parametrize(("momentum", "num_steps"), [(0.0, 3), (0.9, 5), (0.5, 0)])
def test_decay_is_that_of_torchs_optimizer(momentum: float, num_steps: int) -> None:
    training = TrainingSettings(momentum=momentum, weight_decay=0.1)
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], 0.3, momentum, weight_decay=0.1)
    for _ in range(num_steps):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert kept_by_decay(training, 0.3, num_steps) == pytest.approx(weight.item())
    assert kept_by_decay(TrainingSettings(momentum=momentum), 0.3, num_steps) == 1.0


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
@pytest.mark.parametrize("training", [TRAINING, WITH_EVERYTHING])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_bases_are_those_of_training_each(
    training: TrainingSettings, has_major: bool, temperature: float
) -> None:
    task, data = normed_task(training), noisy(9, 0, seed=4)
    combination = unequal(task, has_major=has_major)
    arguments = (task, combination, temperature, data.train, RATE, RandomKey(2))
    found, result = train_bases(*arguments)
    expected = by_brute_force(task, combination, data, temperature)
    number = task.model.num_parameters
    assert not torch.allclose(expected, combination.models[:, :number], atol=1e-2)
    torch.testing.assert_close(found[:, :number], expected, rtol=1e-4, atol=1e-5)
    # All have the running statistics of the model that was trained.
    for model in found:
        assert torch.equal(model[number:], result.weights[number:])


def test_jointly_the_bases_move_alike_where_the_combination_stays() -> None:
    task, data = normed_task(WITH_EVERYTHING), noisy(9, 0, seed=4)
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
    found, _ = train_bases(task, combination, 1e-4, data.train, RATE, RandomKey(2))
    stays = combination.blocks.spread(shares) == 0
    stays[:, task.model.num_parameters :] = False
    assert torch.equal(found[stays], combination.models[stays])


def test_learning_a_combination_lowers_the_loss_and_leaves_the_bases() -> None:
    task, data = normed_task(TRAINING), noisy(12, 0, seed=4)
    combination = Combination(
        unequal(task, has_major=True).models, layers(task.model), True, 20.0
    )
    before = combination.models.clone()

    def loss(weights: Tensor) -> float:
        logits = task.logits(weights, data.train.images)
        return float(functional.cross_entropy(logits, data.train.labels))

    start = combination.combined()
    result = learn_combination(task, combination, data.train, 0.1, RandomKey(1), 20)
    assert torch.equal(combination.models, before)
    number = task.model.num_parameters
    assert torch.equal(result.weights[:number], combination.combined()[:number])
    learned = torch.cat([result.weights[:number], start[number:]])
    assert loss(learned) < loss(start) - 0.01
    torch.testing.assert_close(combination.shares().sum(dim=0), torch.ones(2))
    assert torch.equal(combination.shares()[0], torch.full((2,), 0.5))


def update(*values: float, num_examples: int = 1) -> BasesUpdate:
    return BasesUpdate((torch.tensor(values),), num_examples, 0.5)


def test_models_are_averaged_by_their_examples() -> None:
    two = BasesUpdate((torch.tensor([4.0]), torch.tensor([8.0])), 3, 0.5)
    one = BasesUpdate((torch.tensor([0.0]), torch.tensor([-8.0])), 1, 0.5)
    assert [mean.tolist() for mean in mean_models([two, one])] == [[3.0], [4.0]]


def test_buffers_are_averaged_and_not_compared() -> None:
    # Two parameters and a buffer, which alone would pair the first with the third.
    updates = [
        update(0.0, 0.0, 900.0),
        update(0.0, 1.0, -900.0, num_examples=3),
        update(9.0, 9.0, 900.0),
    ]
    center = torch.tensor([3.0, 3.0])
    found = clustered(updates, center, 2, RandomKey(0))
    assert sorted(mean.tolist() for mean in found) == [[0, 0.75, -450], [9, 9, 900]]


@pytest.mark.parametrize("seed", range(5))
def test_groups_far_apart_are_found(seed: int) -> None:
    points = torch.tensor([[0.0, 0], [9, 9], [0, 1], [9, 8], [-9, 5], [8, 9]])
    found = clusters(points, 3, RandomKey(seed)).tolist()
    groups = {tuple(i for i in range(6) if found[i] == k) for k in range(3)}
    assert groups == {(0, 2), (1, 3, 5), (4,)}


@pytest.mark.parametrize("seed", range(4))
def test_every_point_is_with_the_nearest_mean(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(30, 3, generator=generator)
    found = clusters(points, 4, RandomKey(seed))
    means = torch.stack([points[found == k].mean(dim=0) for k in range(4)])
    assert torch.equal(torch.cdist(points, means).argmin(dim=1), found)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 5.0]), min_size=1, max_size=8),
    count=st.integers(1, 8),
    seed=st.integers(0, 5),
)
def test_no_cluster_is_empty(values: list[float], count: int, seed: int) -> None:
    points = torch.tensor(values)[:, None]
    if len(points) < count:
        with pytest.raises(ValueError, match=f"expected at least {count} points"):
            clusters(points, count, RandomKey(seed))
        return
    found = clusters(points, count, RandomKey(seed))
    assert sorted(set(found.tolist())) == list(range(count))
    assert torch.equal(found, clusters(points, count, RandomKey(seed)))
