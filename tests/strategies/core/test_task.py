import dataclasses

import torch

from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.training import local_sgd
from tests.strategies.trained_methods import MakeClient, MakeTask


def test_predictions_are_made_in_evaluation_mode(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task, train = normed_task(TrainingSettings()), noisy(8, 0, seed=1).train
    weights = local_sgd(task, task.initial_weights, train, 0.1, key).weights
    # BatchNorm in training mode would normalise with the other images' statistics.
    together = task.probabilities(weights, train.images)
    alone = [task.probabilities(weights, image[None]) for image in train.images]
    torch.testing.assert_close(torch.cat(alone), together)
    assert torch.equal(task.model.read(), weights)


def test_head_of_the_embeddings_is_the_model(
    normed_task: MakeTask, noisy: MakeClient
) -> None:
    task = dataclasses.replace(normed_task(TrainingSettings()), evaluation_batch_size=3)
    images, weights = noisy(8, 0, seed=1).train.images, task.initial_weights
    embeddings = task.embed(weights, images)
    assert embeddings.shape == (8, 4)
    expected = task.probabilities(weights, images)
    assert torch.equal(task.head(weights, embeddings), expected)
    logits = task.logits(weights, images)
    torch.testing.assert_close(logits.softmax(dim=1), expected)


def test_no_images(normed_task: MakeTask, noisy: MakeClient) -> None:
    task, images = normed_task(TrainingSettings()), noisy(0, 0, seed=1).train.images
    assert task.embed(task.initial_weights, images).shape == (0, 4)
    assert task.probabilities(task.initial_weights, images).shape == (0, 3)


def test_what_leaves_in_bfloat16_is_float32_and_close(
    normed_task: MakeTask, noisy: MakeClient
) -> None:
    exact = normed_task(TrainingSettings())
    mixed = normed_task(TrainingSettings(precision="bfloat16"))
    images, weights = noisy(8, 0, seed=1).train.images, exact.initial_weights
    for name in ("embed", "logits", "probabilities"):
        expected = getattr(exact, name)(weights, images)
        found = getattr(mixed, name)(weights, images)
        assert found.dtype == torch.float32
        assert not torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
    assert torch.equal(
        mixed.head(weights, mixed.embed(weights, images)),
        mixed.probabilities(weights, images),
    )
    sums = mixed.probabilities(weights, images).sum(dim=1)
    torch.testing.assert_close(sums, torch.ones(8))
