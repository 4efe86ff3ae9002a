import torch

from knnper.experiment import TrainingSettings
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.records import ModelState
from knnper.strategies.fedmedian import FedMedian
from tests.strategies.small_updates import random_updates, updates
from tests.strategies.trained_methods import MakeTask

BEFORE = ModelState(torch.zeros(2))


def test_the_median_of_each_weight_whatever_the_sizes(linear_task: MakeTask) -> None:
    method = FedMedian(linear_task(TrainingSettings()), NoSettings())
    odd = updates([1.0, 9.0], [5.0, 2.0], [1000.0, 4.0], examples=[1, 1, 50])
    assert method.aggregate(BEFORE, iter(odd)).weights.tolist() == [5, 4]
    # Of an even number, the mean of the two in the middle.
    even = updates([1.0, 9.0], [5.0, 2.0], [1000.0, 4.0], [2.0, 5.0])
    assert method.aggregate(BEFORE, iter(even)).weights.tolist() == [3.5, 4.5]


def test_one_client_is_its_own_median(normed_task: MakeTask) -> None:
    task = normed_task(TrainingSettings())
    alone = random_updates(1, task.model.num_weights, seed=1)
    method = FedMedian(task, NoSettings())
    after = method.aggregate(ModelState(task.initial_weights), iter(alone))
    assert torch.equal(after.weights, alone[0][1].weights)


def test_parameters_and_buffers_are_the_medians(normed_task: MakeTask) -> None:
    task = normed_task(TrainingSettings())
    held = random_updates(7, task.model.num_weights, seed=1)
    method = FedMedian(task, NoSettings())
    after = method.aggregate(ModelState(task.initial_weights), iter(held))
    expected = torch.stack([one.weights for _, one in held]).median(dim=0).values
    assert torch.equal(after.weights, expected)
