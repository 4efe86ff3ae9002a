"""FedBasis: every client is served its own convex combination of a few shared models.

"Learning Shareable Bases for Personalized Federated Image Classification"
(Chen et al. 2023), section 4, Algorithms 1 and 2. With bases v_1 ... v_K and the
major basis v' (section 4.4), a client's model is, block by block,

    θ_m = ½ v' + ½ Σ_k α_m[k] v_k,    α_m = softmax(ψ_m)

(without v', θ_m = Σ_k α_m[k] v_k, Eq. 4). A client's round (Eq. 9) starts from the
uniform α and the server's bases:

    α ← argmin L(α, V) by SGD on ψ, with the bases frozen
    α† ← softmax(ψ / τ)
    V ← argmin L(α†, V) by SGD on all bases, with α† frozen

The server averages each basis. Without ``coordinate_descent``, ψ and V are trained
together (Eq. 7), the gradient of V taken with α†; τ = 1 is then the paper's baseline,
whose bases collapse. In the first rounds there is one model, FedAvg's; at their end the
clients' models are put into K clusters, whose means are the bases.

Departures: ψ takes plain SGD steps at a rate of its own. Means weight each client by
its number of examples, so that one basis is FedAvg. Buffers such as BatchNorm's running
statistics have no gradient: all bases take those of the client's combination.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.errors import RunError
from knnper.experiment import (
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ProperFraction,
    Settings,
)
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import Updates
from knnper.strategies.core.bases import (
    Bases,
    BasesState,
    BasesUpdate,
    Combination,
    clustered,
    layers,
    learn_combination,
    mean_models,
    stages,
    train_bases,
    train_jointly,
    whole_model,
)
from knnper.strategies.core.method import Method, unlike_sent
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import NoState
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd

_BLOCKS = {"layers": layers, "stages": stages, "whole": whole_model}


@dataclass(frozen=True)
class FedBasisSettings(Settings):
    """The bases and how they are kept apart.

    Attributes
    ----------
    num_bases
        K, without the major basis: traffic is K or K + 1 times FedAvg's. 3, 4 or 8 in
        the paper; 1 without a major basis is FedAvg.
    major_basis
        Whether v', like the global model of FedAvg, is half of every combination.
    blocks
        ``layers``: a combination for each layer and one for the head; ``stages``: one
        for each sequence of layers and one for the head, as in the paper, whose
        ResNet-18 has four of them; ``whole``: one.
    coordinate_descent
        Whether a client trains its combination, then the bases; else both together.
    temperature
        τ of the combination that the bases are trained with; 1 does not sharpen it.
    combination_learning_rate
        Of ψ, 0.1 to 10.
    combination_epochs
        Passes over the training data for ψ, before those for the bases.
    warm_start_fraction
        Part of the rounds in which FedAvg's one model is trained, to become the bases;
        0 starts from random ones.
    unseen_epochs
        Passes over a client's data to find its combination after the last round, for
        clients that were seen too: nothing of a combination is kept.
    personal_classifier
        Whether the whole head is trained then, at the rate of the first round.
    """

    num_bases: PositiveInt = 3
    major_basis: bool = True
    blocks: Literal["layers", "stages", "whole"] = "layers"
    coordinate_descent: bool = True
    temperature: PositiveFraction = 0.1
    combination_learning_rate: PositiveFloat = 1.0
    combination_epochs: PositiveInt = 5
    warm_start_fraction: ProperFraction = 0.3
    unseen_epochs: PositiveInt = 20
    personal_classifier: bool = True

    @property
    def num_models(self) -> int:
        """K, or K + 1 with the major basis."""
        return self.num_bases + self.major_basis


class FedBasis(Method):
    """Each client combines the weights of a few shared models, block by block."""

    title = "FedBasis"
    source = "Chen et al. 2023, section 4, Algorithms 1 and 2"
    upload = "K + 1 (num_bases)"
    download = "K + 1 (num_bases)"
    server_state = "K + 1 (num_bases)"
    unseen = "a combination of the bases, and a head, learned on its own data"
    reference_title = "FedBasis (uniform combination)"
    holds_all_updates = True
    state_type = BasesState
    payload_type = Bases
    update_type = BasesUpdate

    settings: FedBasisSettings

    def init(self, clients: Sequence[str], rng: RandomKey) -> BasesState:
        seed = rng.child("clusters").entropy(num_bytes=6)
        if num_warm_rounds(self.task, self.settings) > 0:
            self._require_replies(len(clients))
            return BasesState((self.task.initial_weights,), 0, seed)
        others = range(1, self.settings.num_models)
        fresh = [self.task.fresh_weights(rng.child("basis", k)) for k in others]
        return BasesState((self.task.initial_weights, *fresh), 0, seed)

    def broadcast(self, state: BasesState, client_id: str, rng: RandomKey) -> Bases:
        return Bases(state.models)

    def client_update(
        self,
        payload: Bases,
        client_state: NoState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[NoState, BasesUpdate]:
        rate = self.task.training.learning_rate_at(server_round)
        _, update = local_round(
            self.task, self.settings, payload, data.train, rate, rng
        )
        return NoState(), update

    def personalize(
        self,
        payload: Bases,
        client_state: NoState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> ModelPredictor:
        """Return the combination that was learned on both splits: nothing is chosen."""

        def served(examples: Examples) -> ModelPredictor:
            return self._personalized(payload, examples, rng)

        predictor = served(data.train_and_validation())
        return replace(predictor, trained_alone=lambda: served(data.train))

    def update_problem(self, payload: Bases, update: BasesUpdate) -> str | None:
        return unlike_sent(payload, update, "models")

    def _personalized(
        self, payload: Bases, examples: Examples, rng: RandomKey
    ) -> ModelPredictor:
        combination = _combination(self.task, self.settings, payload)
        head = self.task.head_mask if self.settings.personal_classifier else None
        to_learn = len(payload.models) > 1 or head is not None
        # As in a first round: the last rate may be a hundredth of it.
        rate = self.task.training.learning_rate_at(1)
        weights = learn_combination(
            self.task,
            combination,
            examples,
            rate,
            rng,
            self.settings.unseen_epochs if to_learn else 0,
            free=head,
        ).weights
        return ModelPredictor(self.task, weights, combination.describe(free=head))

    def aggregate(self, state: BasesState, updates: Updates[BasesUpdate]) -> BasesState:
        num_rounds, num_bases = state.num_rounds + 1, self.settings.num_bases
        has_bases = len(state.models) == self.settings.num_models
        if has_bases or num_rounds < num_warm_rounds(self.task, self.settings):
            models = mean_models(update for _, update in updates)
            return BasesState(models, num_rounds, state.seed)
        # The clusters' first centre is drawn by position.
        replies = [update for _, update in sorted(updates, key=lambda pair: pair[0])]
        models = mean_models(replies)
        if len(replies) >= num_bases:  # with fewer, the warm start goes on for a round
            center = models[0][: self.task.model.num_parameters]
            bases = clustered(replies, center, num_bases, RandomKey(state.seed))
            models = (*models, *bases) if self.settings.major_basis else bases
        return BasesState(models, num_rounds, state.seed)

    def _require_replies(self, num_clients: int) -> None:
        participation, least = self.task.training.participation, self.settings.num_bases
        if participation * num_clients + 0.5 < least:
            raise RunError(
                f"found {num_clients} clients of which {participation:g} take part in "
                f"a round, expected at least {least} in a round, one for each of "
                "method.num_bases; lower it, or raise training.participation"
            )


def num_warm_rounds(task: Task, settings: FedBasisSettings) -> int:
    """Return the rounds of the warm start, 0 where there is nothing to start."""
    if settings.num_models == 1 or settings.warm_start_fraction == 0:
        return 0
    return max(1, round(settings.warm_start_fraction * task.training.num_rounds))


def local_round(
    task: Task,
    settings: FedBasisSettings,
    payload: Bases,
    examples: Examples,
    learning_rate: float,
    rng: RandomKey,
) -> tuple[Tensor, BasesUpdate]:
    """Train as a client does in a round; return α, shape (K, B), and the update."""
    arguments = (examples, learning_rate, rng)
    combination = _combination(task, settings, payload)
    temperature = settings.temperature
    if len(payload.models) == 1:
        result = local_sgd(task, payload.models[0], *arguments)
        models = result.weights[None]
    elif settings.coordinate_descent:
        learn_combination(
            task,
            combination,
            examples,
            learning_rate,
            rng.child("combination"),
            settings.combination_epochs,
        )
        models, result = train_bases(task, combination, temperature, *arguments)
    else:
        models, result = train_jointly(task, combination, temperature, *arguments)
    update = BasesUpdate(models.unbind(), len(examples), result.train_loss)
    return combination.alpha().cpu(), update


def _combination(task: Task, settings: FedBasisSettings, payload: Bases) -> Combination:
    models = torch.stack(payload.models).to(task.model.device)
    return Combination(
        models,
        _BLOCKS[settings.blocks](task.model),
        settings.major_basis and len(models) > 1,
        settings.combination_learning_rate,
    )
