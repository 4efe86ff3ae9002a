"""A client's training in parts and by steps of one's own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from knnper.data.examples import Examples
from knnper.experiment import TrainingSettings
from knnper.models.flat import EmbeddingModel
from knnper.seeding import RandomKey
from knnper.strategies.core.training import (
    LocalModel,
    cross_entropy,
    local_sgd,
    sgd_step,
)
from tests.strategies.trained_methods import MakeClient, MakeTask


class TestTrainable:
    """A part of the weights is trained, the rest stays."""

    def test_nothing_else_moves(
        self, normed_task: MakeTask, noisy: MakeClient, key: RandomKey
    ) -> None:
        training = TrainingSettings(batch_size=4, momentum=0.9, weight_decay=0.1)
        task = normed_task(training)
        examples = noisy(13, 0, seed=1).train
        everything = local_sgd(task, task.initial_weights, examples, 0.1, key).weights
        head = local_sgd(
            task, task.initial_weights, examples, 0.1, key, trainable=task.head_mask
        ).weights
        assert torch.equal(head != task.initial_weights, task.head_mask)
        assert bool((everything != task.initial_weights).all())

    def test_the_model_is_as_before(
        self, normed_task: MakeTask, noisy: MakeClient, key: RandomKey
    ) -> None:
        task = normed_task(TrainingSettings(batch_size=4))
        examples = noisy(13, 0, seed=1).train
        before = local_sgd(task, task.initial_weights, examples, 0.1, key).weights
        local_sgd(
            task, task.initial_weights, examples, 0.1, key, trainable=task.head_mask
        )
        after = local_sgd(task, task.initial_weights, examples, 0.1, key).weights
        assert torch.equal(before, after)

    def test_of_the_head_alone_the_body_is_passed_once(
        self,
        normed_task: MakeTask,
        noisy: MakeClient,
        key: RandomKey,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        training = TrainingSettings(batch_size=4, local_epochs=5, momentum=0.9)
        task, train = normed_task(training), noisy(13, 0, seed=1).train
        module, passed = task.model.module, list[int]()
        embed = module.embed

        def counting(x: Tensor) -> Tensor:
            passed.append(len(x))
            return embed(x)

        monkeypatch.setattr(module, "embed", counting)

        def trained(**given: Any) -> Tensor:
            return local_sgd(
                task,
                task.initial_weights,
                train,
                0.1,
                key,
                trainable=task.head_mask,
                **given,
            ).weights

        found = trained()
        assert passed == [13]
        # Another name for the same objective: the way that passes each mini-batch.
        slowly = trained(objective=lambda *given: cross_entropy(*given))
        assert passed == [13, *(15 * [4])]
        torch.testing.assert_close(found, slowly)

    def test_with_nothing_to_train_nothing_is_done(
        self, normed_task: MakeTask, noisy: MakeClient, key: RandomKey
    ) -> None:
        task = normed_task(TrainingSettings(batch_size=4))
        nothing = torch.zeros(task.model.num_weights, dtype=torch.bool)
        found = local_sgd(
            task,
            task.initial_weights,
            noisy(13, 0, seed=1).train,
            0.1,
            key,
            trainable=nothing,
        )
        assert torch.equal(found.weights, task.initial_weights)
        assert found.num_steps == 0

    def test_with_everything_it_is_ordinary(
        self, normed_task: MakeTask, noisy: MakeClient, key: RandomKey
    ) -> None:
        task, examples = (
            normed_task(TrainingSettings(batch_size=4)),
            noisy(13, 0, seed=1).train,
        )
        everything = torch.ones(task.model.num_weights, dtype=torch.bool)
        expected = local_sgd(task, task.initial_weights, examples, 0.1, key)
        found = local_sgd(
            task, task.initial_weights, examples, 0.1, key, trainable=everything
        )
        assert torch.equal(found.weights, expected.weights)


class TestSteps:
    """What a step of one's own can do."""

    def test_other_batches_leave_the_first_alone(
        self, normed_task: MakeTask, noisy: MakeClient, key: RandomKey
    ) -> None:
        def step(model: LocalModel) -> Tensor:
            model.independent_batch()
            return sgd_step(model)

        task, examples = (
            normed_task(TrainingSettings(batch_size=4)),
            noisy(13, 0, seed=1).train,
        )
        expected = local_sgd(task, task.initial_weights, examples, 0.1, key)
        found = local_sgd(
            task, task.initial_weights, examples, 0.1, key, local_step=step
        )
        assert torch.equal(found.weights, expected.weights)

    def test_a_gradient_elsewhere_leaves_the_parameters(
        self, linear_task: MakeTask, key: RandomKey
    ) -> None:
        def step(model: LocalModel) -> Tensor:
            elsewhere = torch.tensor([0.5, -0.5])
            loss = model.backward(model.next_batch(), at=elsewhere)
            assert model.parameters.tolist() == [0.0, 0.0]
            model.step()
            return loss

        # At (½, -½), x = 1, label 0: p_1 = 1 / (1 + e) and the gradient (-p_1, p_1).
        task = linear_task(TrainingSettings(batch_size=1))
        image = torch.full((1, 1, 1, 1), 255, dtype=torch.uint8)
        examples = Examples(image, torch.tensor([0]))
        result = local_sgd(task, torch.zeros(2), examples, 1.0, key, local_step=step)
        torch.testing.assert_close(
            result.weights, torch.tensor([0.2689414, -0.2689414])
        )

    def test_another_objective(self, linear_task: MakeTask, key: RandomKey) -> None:
        def squared(module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
            squares: Tensor = (module(inputs)[:, 0] - 1) ** 2
            return squares

        # d/dw (w - 1)² = -2 at 0, and nothing on the other logit.
        task = linear_task(TrainingSettings(batch_size=1))
        image = torch.full((1, 1, 1, 1), 255, dtype=torch.uint8)
        examples = Examples(image, torch.tensor([0]))
        result = local_sgd(task, torch.zeros(2), examples, 0.25, key, objective=squared)
        assert result.weights.tolist() == [0.5, 0.0]
        assert result.train_loss == 1.0
