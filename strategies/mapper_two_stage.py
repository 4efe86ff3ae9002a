"""Mapper in two stages: a local model, mixed with what a client would be served.

Mansour, Mohri, Ro, Suresh, "Three Approaches for Personalization with Applications to
Federated Learning", 2020, section 6: "a common approach for model interpolation in
practice is to first train the central model and then train the local model separately
and find the best interpolation coefficients" of λ h_l + (1 - λ) h_c. The joint form is
`knnper.strategies.mapper`.

h_l starts from the weights of h_c (appendix F.2), so with λ = 1 it is fine-tuning; with
λ = 0 the method is as it was. Of equal λ the smallest is taken. Departure: λ is chosen
by the log-loss on the validation split where there is one (else, as in the paper, on
the training split), and h_l is then trained anew on both splits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.errors import Problem
from knnper.experiment import Experiment, PositiveFloat, PositiveInt, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, Personalizer, repetitions
from knnper.strategies.core.predictors import MixturePredictor, ModelPredictor
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fine_tuning import one_model
from knnper.strategies.mapper import Cover, Pair, best_pair, interpolated


@dataclass(frozen=True)
class TwoStageSettings(Settings):
    """The local model and its part in the mixture.

    Attributes
    ----------
    interpolation_weights
        The values of λ that a client chooses from, all different. 0 is the served model
        alone, 1 the local model alone.
    local_epochs
        Passes over the client's data in which the local model is trained; 1 in the
        paper.
    local_learning_rate
        Of the local model; null is the training section's rate in the last round. 0.03
        in the paper.
    """

    interpolation_weights: Cover = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    local_epochs: PositiveInt = 1
    local_learning_rate: PositiveFloat | None = None


class TwoStageMapper(Personalizer):
    """The served model and one that each client trains from it, mixed."""

    title = "Mapper (two stages)"
    source = "Mansour et al. 2020, section 6"
    unseen = "trains and mixes a local model like any other client"
    needs_one_model = True
    trains = True

    settings: TwoStageSettings

    def __init__(self, task: Task, method: Method, settings: TwoStageSettings) -> None:
        super().__init__(task, method, settings)
        last_rate = task.training.learning_rate_at(task.training.num_rounds)
        self._rate = settings.local_learning_rate or last_rate

    def _trained(self, central: Tensor, examples: Examples, rng: RandomKey) -> Tensor:
        return local_sgd(
            self.task,
            central,
            examples,
            self._rate,
            rng,
            num_epochs=self.settings.local_epochs,
        ).weights

    def _mixed(self, base: ModelPredictor, pair: Pair) -> MixturePredictor:
        mixture = interpolated(self.task, base.weights, pair)
        return replace(mixture, chosen={**base.chosen, **mixture.chosen})

    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> MixturePredictor:
        base = one_model(self.method.personalize(payload, client_state, data, rng))
        nothing_held_out = len(data.validation) == 0
        before = base if nothing_held_out else base.without_validation()
        local = self._trained(before.weights, data.train, rng)
        cover = sorted(self.settings.interpolation_weights)
        pairs = [Pair(share, local) for share in cover]
        alone = best_pair(self.task, before.weights, pairs, data)
        if nothing_held_out:
            return self._mixed(base, alone)
        both = self._trained(base.weights, data.train_and_validation(), rng)
        return replace(
            self._mixed(base, replace(alone, local=both)),
            trained_alone=lambda: self._mixed(before, alone),
        )

    @staticmethod
    def check(settings: TwoStageSettings, experiment: Experiment) -> Sequence[Problem]:
        grid = settings.interpolation_weights
        return repetitions("personalization.interpolation_weights", grid)
