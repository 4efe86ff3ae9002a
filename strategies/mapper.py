"""Mapper: a central model and a local one at each client, and their mixture.

Mansour, Mohri, Ro, Suresh, "Three Approaches for Personalization with Applications to
Federated Learning", 2020, section 6 and appendix E.2. A participant of a round, with
h_c the received central model, does:

    1. for each λ of a cover of [0, 1]
       h_λ = argmin_h L(λ h + (1 - λ) h_c)                          (Eq. 10)
    2. λ*, h_l = argmin over these pairs of L(λ h_λ + (1 - λ) h_c)  (Eq. 11)
    3. train h_c on L(λ* h_l + (1 - λ*) h_c) with h_l fixed         (Eq. 12)

Here h are probabilities and L is the log-loss of their mixture; for a model that makes
several predictions for an example, L is the mean over these, each a mixture. Each h_λ
starts from h_c (appendix F.2). After the last round every client does steps 1 and 2
once more.

The two-stage variant is a personalisation on top of any method that serves one model
(section 6: "a common approach for model interpolation in practice is to first train the
central model and then train the local model separately and find the best interpolation
coefficients"). It trains h_l once, on its own loss, from the weights of h_c. So λ = 1
is fine-tuning and λ = 0 is the method itself; of equally good λ the smallest wins.

With a cover of 0 alone Mapper is FedAvg. If λ* is 1, the loss of step 3 does not depend
on the central model. The client then returns it unchanged, without weight decay or new
statistics of BatchNorm. With a cover of 1 alone the central model is never trained, and
each client serves a model trained on its own data.

Departures from the paper:

- A client with validation data compares the pairs of step 2 on it; on the data that h_λ
  was trained on the larger λ nearly always wins. A client without uses its training
  split, as the paper does.
- A client serves an h_l trained with λ* on both splits.
- Step 3 is the local training of FedAvg, and several clients take part in a round.
- The first rounds are FedAvg's. With a random h_c, λ* is 1, and h_c is never trained.
- The copy of the paper at hand lacks the formulas; they are those of the original.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.embedding_model import EmbeddingModel
from knnper.flat_model import FlatModel
from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat, PositiveInt, Settings, UnitInterval
from knnper.strategies.core.evaluation import score
from knnper.strategies.core.method import ALL_DIFFER, Method, Personalizer
from knnper.strategies.core.predictors import MixturePredictor, ModelPredictor
from knnper.strategies.core.records import ModelPayload, ModelUpdate, NoState
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import Objective, cross_entropy, local_sgd
from knnper.strategies.fine_tuning import one_model

Cover = Annotated[tuple[UnitInterval, ...], Field(min_length=1), ALL_DIFFER]


@dataclass(frozen=True)
class TwoStageSettings(Settings):
    """The local model and its weight in the mixture.

    Attributes
    ----------
    interpolation_weights
        The values of λ that a client chooses from, in [0, 1] and all different. 0 is
        the served model alone, 1 the local model alone.
    local_epochs
        Passes over the client's data that train the local model; useful from 1 to 20, 1
        in the paper.
    local_learning_rate
        Learning rate of the local model; null is the training section's rate in the
        last round. 0.03 in the paper.
    """

    interpolation_weights: Cover = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    local_epochs: PositiveInt = 1
    local_learning_rate: PositiveFloat | None = None


@dataclass(frozen=True)
class MapperSettings(TwoStageSettings):
    """The local models and their weight in the mixture.

    Attributes
    ----------
    interpolation_weights
        The cover of [0, 1] from which a client chooses its λ, all values different. 0
        is the central model alone, 1 the local model alone. Every value but 0 costs one
        local training.
    local_learning_rate
        Learning rate of the local models; null is the training section's. 0.03 in the
        paper.
    warm_start_fraction
        The fraction of the rounds, at the start, that train the central model alone, as
        FedAvg does. 0 is the paper's algorithm; 1 trains local models after the last
        round only.
    """

    interpolation_weights: Cover = (0.0, 0.25, 0.5, 0.75, 1.0)
    warm_start_fraction: UnitInterval = 0.5


@dataclass(frozen=True)
class Pair:
    """A local model and its weight in the mixture."""

    interpolation_weight: float  # λ
    local: Tensor  # h_l, shape (num_weights,)


class Mapper(Method):
    """A central and a local model at each client, trained for their mixture."""

    title = "Mapper"
    needs_num_rounds = "its warm start is a part of all rounds"
    needs_cross_entropy = "its loss is -log of a mixture of probabilities"
    source = "Mansour et al. 2020, appendix E.2, Eq. 10-12"
    unseen = "trains and mixes a local model like any other client"
    learns_from_validation = "all"
    chooses_on_validation = True
    reference_title = "Mapper (central model)"
    serves_one_model = False
    ends_with_global_model = True

    settings: MapperSettings

    def _local_model(
        self, central: Tensor, share: float, data: Examples, rate: float, rng: RandomKey
    ) -> Pair:
        if share == 0.0:  # the loss does not depend on the local model
            return Pair(share, central)
        trained = local_sgd(
            self.task,
            central,
            data,
            self.settings.local_learning_rate or rate,
            rng.child("local"),
            num_epochs=self.settings.local_epochs,
            objective=mixture_loss(self.task, share, central),
        )
        return Pair(share, trained.weights)

    def _best(
        self, central: Tensor, data: ClientData, rate: float, rng: RandomKey
    ) -> Pair:
        pairs = [
            self._local_model(central, share, data.train, rate, rng)
            for share in sorted(self.settings.interpolation_weights)
        ]
        return best_pair(self.task, central, pairs, data)

    @override
    def client_update(
        self,
        payload: ModelPayload,
        client_state: NoState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[NoState, ModelUpdate]:
        training, central = self.task.training, payload.weights
        rate, pair = training.learning_rate_at(server_round), Pair(0.0, central)
        if server_round > self.settings.warm_start_fraction * training.num_rounds:
            pair = self._best(central, data, rate, rng)
        share, examples = pair.interpolation_weight, data.train
        if share == 1.0:
            # Steps without a gradient would still decay weights and change buffers.
            loss = float(self.task.losses(pair.local, examples).mean())
            return NoState(), ModelUpdate(central, len(examples), loss)
        eq_12 = mixture_loss(self.task, 1 - share, pair.local)
        trained = local_sgd(self.task, central, examples, rate, rng, objective=eq_12)
        return NoState(), trained.update(len(examples))

    @override
    def personalize(
        self, payload: ModelPayload, client_state: Any, data: ClientData, rng: RandomKey
    ) -> MixturePredictor:
        rate, central = self.task.last_rate, payload.weights
        alone = self._best(central, data, rate, rng)
        if len(data.validation) == 0:
            return interpolated(self.task, central, alone)
        share, everything = alone.interpolation_weight, data.train_and_validation()
        both = self._local_model(central, share, everything, rate, rng)
        return replace(
            interpolated(self.task, central, both),
            trained_alone=lambda: interpolated(self.task, central, alone),
        )


class TwoStageMapper(Personalizer):
    """A mixture of the served model and one that each client trains from it."""

    name = "mapper_two_stage"
    title = "Mapper (two stages)"
    needs_cross_entropy = Mapper.needs_cross_entropy
    source = "Mansour et al. 2020, section 6"
    unseen = "trains and mixes a local model like any other client"
    chooses_on_validation = True
    needs_one_model = True
    trains = True

    settings: TwoStageSettings

    def _mixed(self, base: ModelPredictor, pair: Pair) -> MixturePredictor:
        mixture = interpolated(base.task, base.weights, pair)
        return replace(mixture, chosen={**base.chosen, **mixture.chosen})

    @override
    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> MixturePredictor:
        rate = self.settings.local_learning_rate or self.task.last_rate
        epochs = self.settings.local_epochs

        def trained(start: ModelPredictor, examples: Examples) -> Tensor:
            weights = start.weights
            return local_sgd(
                start.task, weights, examples, rate, rng, num_epochs=epochs
            ).weights

        base = one_model(self.method.personalize(payload, client_state, data, rng))
        nothing_held_out = len(data.validation) == 0
        before = base if nothing_held_out else base.without_validation()
        local = trained(before, data.train)
        pairs = [
            Pair(share, local) for share in sorted(self.settings.interpolation_weights)
        ]
        alone = best_pair(before.task, before.weights, pairs, data)
        if nothing_held_out:
            return self._mixed(base, alone)
        both = trained(base, data.train_and_validation())
        return replace(
            self._mixed(base, replace(alone, local=both)),
            trained_alone=lambda: self._mixed(before, alone),
        )


def interpolated(task: Task, central: Tensor, pair: Pair) -> MixturePredictor:
    """Return the predictor of λ h_l + (1 - λ) h_c, with h_c of shape (num_weights,)."""
    share = pair.interpolation_weight
    weights = torch.tensor([1 - share, share])
    chosen = {"interpolation_weight": share}
    return MixturePredictor(task, (central, pair.local), weights, chosen)


def best_pair(
    task: Task, central: Tensor, pairs: Sequence[Pair], data: ClientData
) -> Pair:
    """Return the pair with the smallest log-loss of the mixture with h_c.

    Mansour et al. 2020, Eq. 11. The loss is on the validation split, or on the training
    split if there is none. Ties go to the first pair. Without training data the result
    is the central model alone.
    """
    if len(data.train) == 0:
        return Pair(0.0, central)
    if len(pairs) == 1:
        return pairs[0]
    split = data.validation if len(data.validation) else data.train

    @functools.cache  # by identity of the tensors, since pairs may share a model
    def probabilities(weights: Tensor) -> Tensor:
        return task.probabilities(weights, split.images).double()

    def log_loss(pair: Pair) -> float:
        ends = probabilities(central), probabilities(pair.local)
        mixture = torch.lerp(*ends, pair.interpolation_weight)
        return score(mixture, split.labels).log_loss_sum

    return min(pairs, key=log_loss)


def mixture_loss(task: Task, share: float, fixed: Tensor) -> Objective:
    """Return the objective -log(s h(x)[y] + (1 - s) h'(x)[y]) for h, with h' fixed.

    It is the mean over all predictions if the model makes several for an example.
    """
    if share == 1.0:
        return cross_entropy
    # A copy, since the task's own model is the one that is trained.
    copied = FlatModel(copy.deepcopy(task.model.module), task.model.device)
    copied.load(fixed)
    other = copied.module.eval()
    of_trained = torch.tensor(share, device=task.model.device).log()
    of_fixed = torch.tensor(1 - share, device=task.model.device).log()

    def objective(module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            constant = of_fixed - other.position_losses(inputs, labels)
        trained_term = of_trained - module.position_losses(inputs, labels)
        return -torch.logaddexp(trained_term, constant).mean(dim=1)

    return objective
