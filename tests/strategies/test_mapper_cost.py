"""What Mapper costs a client."""

import pytest
import torch

import knnper.strategies.mapper as mapper_module
from knnper.experiment import TrainingSettings
from knnper.strategies.mapper import Mapper, MapperSettings, Pair, best_pair
from tests.strategies.method_checks import count_trainings, labelled, mixture_served
from tests.strategies.trained_methods import MakeClient, MakeTask

EVERYTHING = TrainingSettings(
    batch_size=3, learning_rate=0.1, momentum=0.9, weight_decay=0.01, num_rounds=2
)


class TestCost:
    """No model is run or trained twice for the same."""

    def test_each_model_makes_one_pass_over_the_data(
        self, linear_task: MakeTask, white: MakeClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task, central, own = linear_task(EVERYTHING), torch.zeros(2), torch.ones(2)
        data, shares = labelled(white, [0, 1], [1]), (0.0, 0.25, 0.5, 1.0)
        passes: list[int] = []
        embed = task.model.module.embed

        def counted(inputs: torch.Tensor) -> torch.Tensor:
            passes.append(len(inputs))
            return embed(inputs)

        monkeypatch.setattr(task.model.module, "embed", counted)
        best_pair(task, central, [Pair(share, own) for share in shares], data)
        assert passes == 2 * [1]  # the validation split, with h_c and with h_l
        passes.clear()
        apart = [Pair(share, own + share) for share in shares[1:]]
        best_pair(task, central, [Pair(0.0, central), *apart], data)
        assert passes == 4 * [1]

    @pytest.mark.parametrize(
        ("num_validation", "expected"), [(4, [9, 9, 13]), (0, [9, 9])]
    )
    def test_without_validation_data_nothing_is_trained_anew(
        self,
        num_validation: int,
        expected: list[int],
        normed_task: MakeTask,
        noisy: MakeClient,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        task, data = normed_task(EVERYTHING), noisy(9, num_validation, seed=1)
        trainings = count_trainings(monkeypatch, mapper_module)
        method = Mapper(task, MapperSettings((0.5, 1.0)))
        found = mixture_served(method, task.initial_weights, data)
        assert trainings == expected
        assert (found.without_validation() is found) == (num_validation == 0)
