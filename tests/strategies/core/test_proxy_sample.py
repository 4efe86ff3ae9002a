"""What the server sends of its own examples, and what a client takes of that."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from knnper.data.examples import Examples
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.task import draw_sample, taken
from tests.strategies.trained_methods import MakeClient, MakeTask


def pairs(examples: Examples) -> Any:
    return zip(examples.images, examples.labels, strict=True)


def test_clients_get_other_examples(normed_task: MakeTask, noisy: MakeClient) -> None:
    proxy = noisy(40, 0, seed=2).train
    task = replace(normed_task(TrainingSettings()), proxy=lambda: proxy)
    drawn = [draw_sample(task, 10, RandomKey(1).child(c)) for c in "ab"]
    assert not torch.equal(drawn[0].images, drawn[1].images)
    every = draw_sample(task, 1000, RandomKey(1))
    assert torch.equal(every.images.to(torch.uint8), proxy.images)
    assert torch.equal(every.labels.long(), proxy.labels)


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (4, 4), (99, 9)])
def test_so_many_are_taken(
    count: int, expected: int, normed_task: MakeTask, noisy: MakeClient
) -> None:
    proxy = noisy(9, 0, seed=2).train
    task = replace(normed_task(TrainingSettings()), proxy=lambda: proxy)
    sample = draw_sample(task, 1000, RandomKey(1))
    found = taken(sample, task.spec, count, RandomKey(3))
    assert len(found) == expected
    assert found.images.dtype == torch.uint8
    known = {(tuple(i.flatten().tolist()), int(y)) for i, y in pairs(proxy)}
    got = [(tuple(i.flatten().tolist()), int(y)) for i, y in pairs(found)]
    assert set(got) <= known
    assert len(set(got)) == expected
