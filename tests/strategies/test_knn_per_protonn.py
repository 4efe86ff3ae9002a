"""kNN-Per with ProtoNN: its two ends, its choice of λ, clients without data."""

import pytest
import torch
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.datastore.protonn import ProtoNNSettings, fit_protonn
from knnper.datastore.tuning import choose_knn_weight
from knnper.seeding import RandomKey
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.knn_per_protonn import PrototypeSettings, compress
from tests.strategies.tiny import tiny_cnn_task

NUM_CLASSES = 3
KEY = RandomKey(4)
TASK = tiny_cnn_task(NUM_CLASSES)
BASE = ModelPredictor(TASK, TASK.initial_weights)


def drawn(count: int, seed: int) -> Examples:
    generator = RandomKey(seed).numpy()
    labels = torch.from_numpy(generator.integers(0, NUM_CLASSES, count))
    images = torch.from_numpy(generator.integers(0, 100, (count, 8, 8, 1))).byte()
    images[:, :3] += (labels * 70).byte()[:, None, None, None]
    return Examples(images, labels)


def served(data: ClientData, *knn_weights: float) -> Tensor:
    settings = PrototypeSettings(knn_weights=knn_weights)
    predictor = compress(BASE, NUM_CLASSES, data, settings, KEY)
    return predictor(drawn(25, 9).images)


def test_lambda_0_is_the_global_model() -> None:
    data = ClientData(drawn(30, 1), drawn(10, 2))
    expected = TASK.probabilities(TASK.initial_weights, drawn(25, 9).images)
    assert torch.equal(served(data, 0.0), expected)


def test_lambda_1_is_protonn_of_both_splits() -> None:
    data = ClientData(drawn(30, 1), drawn(10, 2))
    # Each split in its batch: training makes much of the last bits of its examples.
    embedded = [
        TASK.embed(TASK.initial_weights, split.images)
        for split in (data.train, data.validation)
    ]
    model = fit_protonn(
        torch.cat(embedded),
        data.train_and_validation().labels,
        NUM_CLASSES,
        ProtoNNSettings(),
        KEY.child("prototypes"),
    )
    expected = model(TASK.embed(TASK.initial_weights, drawn(25, 9).images))
    assert torch.equal(served(data, 1.0), expected)


def test_lambda_is_chosen_on_the_validation_split() -> None:
    data = ClientData(drawn(10, 1), drawn(20, 2))
    weights = TASK.initial_weights
    settings = PrototypeSettings()
    predictor = compress(BASE, NUM_CLASSES, data, settings, KEY)
    held_out = data.validation
    alone = TASK.probabilities(weights, held_out.images)

    def best(fitted_to: Examples) -> float:
        model = fit_protonn(
            TASK.embed(weights, fitted_to.images),
            fitted_to.labels,
            NUM_CLASSES,
            settings.prototypes,
            KEY.child("prototypes"),
        )
        local = model(TASK.embed(weights, held_out.images))
        correct = [
            int(((w * local + (1 - w) * alone).argmax(dim=1) == held_out.labels).sum())
            for w in settings.knn_weights
        ]
        return settings.knn_weights[correct.index(max(correct))]

    assert predictor.knn_weight == best(data.train) > 0
    # Prototypes of what they are scored on would choose otherwise.
    assert predictor.knn_weight != best(data.train_and_validation())
    described = predictor.describe()
    assert described["num_stored"] == round(30 / 3)
    assert described["num_bytes"] > 0


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_clients_with_hardly_any_data(sizes: tuple[int, int]) -> None:
    data = ClientData(drawn(sizes[0], 1), drawn(sizes[1], 2))
    predictor = served(data, 0.0, 0.5, 1.0)
    torch.testing.assert_close(predictor.sum(dim=1), torch.ones(25))
    if 0 in sizes:
        expected = TASK.probabilities(TASK.initial_weights, drawn(25, 9).images)
        assert torch.equal(predictor, expected)


def test_the_choice_of_lambda_by_hand() -> None:
    labels = torch.tensor([0, 0, 1])
    local = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.9, 0.1]])
    alone = torch.tensor([[0.4, 0.6], [0.4, 0.6], [0.1, 0.9]])
    # From λ = 0.5 on the first two are right, from 0.6 on the last is wrong.
    assert choose_knn_weight(local, alone, labels, (1.0, 0.3, 0.5, 0.45)) == 0.3
    assert choose_knn_weight(local, alone, labels, (0.6, 1.0)) == 0.6
    assert choose_knn_weight(local, alone, labels, (1.0,)) == 1.0
    # Nothing to go by: the smallest, which is 0 wherever there is a choice.
    assert choose_knn_weight(local[:0], alone[:0], labels[:0], (0.5, 1.0)) == 0.0
    assert choose_knn_weight(local[:0], alone[:0], labels[:0], (0.5,)) == 0.5


def test_log_loss_may_prefer_another_lambda() -> None:
    labels = torch.tensor([0, 1])
    local = torch.tensor([[0.99, 0.01], [0.99, 0.01]])
    alone = torch.tensor([[0.6, 0.4], [0.45, 0.55]])
    weights = (0.0, 0.1, 1.0)
    assert choose_knn_weight(local, alone, labels, weights, "accuracy") == 0.0
    # log(0.639) + log(0.496) is less than log(0.6) + log(0.55).
    assert choose_knn_weight(local, alone, labels, weights, "log_loss") == 0.0
    sure = torch.stack([local[0], local[0].flip(0)])
    assert choose_knn_weight(sure, alone, labels, weights, "log_loss") == 1.0
