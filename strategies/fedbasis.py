"""FedBasis: each client serves its own convex combination of a few shared models.

Chen et al., "Learning Shareable Bases for Personalized Federated Image
Classification", 2023, section 4, Algorithms 1 and 2. With bases v_1 ... v_K and the
major basis v' (section 4.4), a client's model is, block by block,

    θ_m = ½ v' + ½ Σ_k α_m[k] v_k,    α_m = softmax(ψ_m)

(without v', θ_m = Σ_k α_m[k] v_k, Eq. 4). A client's round (Eq. 9) starts from the
uniform α and the server's bases:

    α ← argmin L(α, V) by SGD on ψ, with the bases frozen
    α† ← softmax(ψ / τ)
    V ← argmin L(α†, V) by SGD on all bases, with α† frozen

The server averages each basis. Without ``coordinate_descent``, ψ and V are trained
together (Eq. 7), with the gradient of V computed with α†; τ = 1 is then the paper's
baseline, in which the bases collapse. The first rounds train one model, as FedAvg does
(warm start). At their end the clients' models are clustered, and the K cluster means
become the bases.

Departures from the paper:

- ψ takes plain SGD steps at its own learning rate.
- Means weight clients by their examples, so that FedBasis with one basis is FedAvg.
- Buffers such as BatchNorm's running statistics have no gradient. All bases take the
  buffers of the client's combination.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.errors import Problem, RunError
from knnper.experiment import BufferedTiming, Experiment, TrainingSettings
from knnper.seeding import RandomKey
from knnper.settings import (
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ProperFraction,
    Settings,
)
from knnper.strategies.core.averaging import Updates, average_each, hold
from knnper.strategies.core.blocks import Blocks, layers, stages, whole_model
from knnper.strategies.core.final_training import on_both_splits
from knnper.strategies.core.kmeans import clusters
from knnper.strategies.core.method import Method, unlike_sent
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalModel, LocalResult, local_sgd

_BLOCKS = {"layers": layers, "stages": stages, "whole": whole_model}


def bases_after(
    bases: Tensor, shares: Tensor, combined: Tensor, trained: Tensor, decay: float
) -> Tensor:
    """Compute the bases after SGD from the training of their combination θ alone.

    With θ = Σ_k a_k v_k and fixed a_k, the gradient of v_k is a_k g with g = ∇L(θ)
    (Eq. 8). A step of SGD is linear in weights and gradients, also with momentum and
    weight decay. After several steps v_k = ρ v_k(0) + a_k s, where ρ is the factor of
    weight decay and s, common to all bases, accumulates the g. So θ = ρ θ(0) + c s with
    c = Σ_k a_k²: training θ alone, with its gradient times c, yields s and all bases.

    Parameters
    ----------
    bases, shares
        v_k(0) and a_k, shape (k, num_parameters).
    combined, trained
        θ before and after, shape (num_parameters,).
    decay
        ρ.
    """
    total = (trained - decay * combined) / shares.square().sum(dim=0)
    return decay * bases + shares * total


def kept_by_decay(
    training: TrainingSettings, learning_rate: float, num_steps: int
) -> float:
    """Return ρ, the factor on a weight without gradient by SGD's weight decay."""
    factor, velocity = 1.0, 0.0
    for _ in range(num_steps):
        velocity = training.momentum * velocity + training.weight_decay * factor
        factor -= learning_rate * velocity
    return factor


@dataclass(frozen=True)
class BasesState(Record):
    """The server's state."""

    # Tensors of shape (num_weights,): one in the warm start; then v', with a major
    # basis, and v_1 ... v_K.
    models: tuple[Tensor, ...]
    num_rounds: int  # rounds made
    seed: int  # of the clustering at the end of the warm start


@dataclass(frozen=True)
class Bases(Record):
    """The payload of a client."""

    models: tuple[Tensor, ...]


@dataclass(frozen=True)
class BasesUpdate(Record):
    """The update of a client."""

    models: tuple[Tensor, ...]  # trained, in the order of `BasesState`
    num_examples: int
    train_loss: float


def mean_models(updates: Iterable[BasesUpdate]) -> tuple[Tensor, ...]:
    """Average each model over the updates, weighted by their examples."""
    return average_each((update.models, update.num_examples) for update in updates)


def clustered(
    updates: Sequence[BasesUpdate], center: Tensor, count: int, rng: RandomKey
) -> tuple[Tensor, ...]:
    """Cluster the updates' models; return the means of the ``count`` clusters."""
    first = slice(0, len(center))
    # Small differences from a common centre keep distances exact.
    moved = torch.stack([update.models[0][first] - center for update in updates])
    assignments = clusters(moved, count, rng).tolist()
    groups = [
        [
            update
            for update, assigned in zip(updates, assignments, strict=True)
            if assigned == cluster
        ]
        for cluster in range(count)
    ]
    return tuple(mean_models(group)[0] for group in groups)


class Combination:
    """A client's ψ with the models that it combines: v', if any, and v_1 ... v_K."""

    def __init__(
        self, models: Tensor, blocks: Blocks, has_major: bool, learning_rate: float
    ) -> None:
        self.models = models
        self.blocks = blocks
        self._has_major = has_major
        self._learning_rate = learning_rate
        num_bases = len(models) - has_major
        self._psi = models.new_zeros((num_bases, blocks.num_blocks))

    def alpha(self, temperature: float = 1.0) -> Tensor:
        """Return softmax(ψ / τ), shape (K, B); columns sum to 1."""
        return torch.softmax(self._psi / temperature, dim=0)

    def shares(self, temperature: float = 1.0) -> Tensor:
        """Return the share of each model in each block, (k, B); columns sum to 1."""
        return self._with_major(self.alpha(temperature))

    def combined(self, temperature: float = 1.0) -> Tensor:
        """Return θ, shape (num_weights,), with α, or α† if ``temperature`` is τ."""
        return self.blocks.combine(self.models, self.shares(temperature))

    def describe(self, free: Tensor | None) -> dict[str, float]:
        """Return each basis's mean α over the blocks without ``free`` weights."""
        alpha = self.alpha().cpu()
        if free is not None:
            of_combined = self.blocks.of_weight[~free.to(self.models.device)]
            combined = torch.unique(of_combined).tolist()
            alpha = alpha[:, combined] if combined else alpha
        means = alpha.mean(dim=1).tolist()
        return {f"combination_{number}": mean for number, mean in enumerate(means)}

    def step(self, products: Tensor) -> None:
        """Make a step of SGD on ψ, from v_k · ∇L(θ) over each block, (k, B) (Eq. 8)."""
        psi = self._psi.clone().requires_grad_()
        shares = self._with_major(torch.softmax(psi, dim=0))
        (gradient,) = torch.autograd.grad(shares, psi, products)
        self._psi -= self._learning_rate * gradient

    def _with_major(self, alpha: Tensor) -> Tensor:
        if not self._has_major:
            return alpha
        return torch.cat([alpha.new_full((1, alpha.shape[1]), 0.5), alpha / 2])


def learn_combination(
    task: Task,
    combination: Combination,
    examples: Examples,
    learning_rate: float,
    rng: RandomKey,
    num_epochs: int,
    free: Tensor | None = None,
) -> LocalResult:
    """Train ψ with the bases frozen, and the ``free`` weights directly; return θ."""
    num_parameters = task.model.num_parameters
    blocks = combination.blocks.of_parameters(task.model)
    bases = combination.models[:, :num_parameters]
    mask = torch.zeros(num_parameters, dtype=torch.bool, device=bases.device)
    if free is not None:
        mask |= free[:num_parameters].to(bases.device)

    def step(model: LocalModel) -> Tensor:
        loss = model.backward(model.next_batch())
        combination.step(blocks.sums(bases * model.gradient.masked_fill(mask, 0.0)))
        model.gradient.mul_(mask)
        model.step()
        combined = blocks.combine(bases, combination.shares())
        model.parameters.copy_(torch.where(mask, model.parameters, combined))
        return loss

    start = combination.combined().cpu()
    return local_sgd(
        task,
        start,
        examples,
        learning_rate,
        rng,
        num_epochs=num_epochs,
        local_step=step,
    )


def train_bases(
    task: Task,
    combination: Combination,
    temperature: float,
    examples: Examples,
    learning_rate: float,
    rng: RandomKey,
) -> tuple[Tensor, LocalResult]:
    """Train all bases with α† frozen; return them, shape (k, num_weights).

    Only θ is trained; the bases follow from it, see `bases_after`.
    """
    num_parameters = task.model.num_parameters
    shares = combination.blocks.spread(combination.shares(temperature))
    shares = shares[:, :num_parameters]
    factor = shares.square().sum(dim=0)

    def scale(gradient: Tensor, parameters: Tensor) -> None:
        gradient.mul_(factor)

    start = combination.combined(temperature).cpu()
    result = local_sgd(task, start, examples, learning_rate, rng, gradient_hook=scale)
    trained = bases_after(
        combination.models[:, :num_parameters],
        shares,
        start[:num_parameters].to(shares.device),
        result.weights[:num_parameters].to(shares.device),
        kept_by_decay(task.training, learning_rate, result.num_steps),
    )
    return _with_buffers(trained.cpu(), result), result


def train_jointly(
    task: Task,
    combination: Combination,
    temperature: float,
    examples: Examples,
    learning_rate: float,
    rng: RandomKey,
) -> tuple[Tensor, LocalResult]:
    """Train ψ and all bases together (Eq. 7); return the bases, (k, num_weights).

    Parameters as in `train_bases`; α† enters the gradient of the bases only.
    """
    num_parameters = task.model.num_parameters
    blocks = combination.blocks.of_parameters(task.model)
    bases = nn.Parameter(combination.models[:, :num_parameters].clone())
    optimizer = torch.optim.SGD(
        [bases],
        lr=learning_rate,
        momentum=task.training.momentum,
        weight_decay=task.training.weight_decay,
    )

    def step(model: LocalModel) -> Tensor:
        loss = model.backward(model.next_batch())
        products = blocks.sums(bases.detach() * model.gradient)
        sharpened = blocks.spread(combination.shares(temperature))
        bases.grad = sharpened * model.gradient
        optimizer.step()
        combination.step(products)
        combined = blocks.combine(bases.detach(), combination.shares())
        model.parameters.copy_(combined)
        return loss

    start = combination.combined().cpu()
    result = local_sgd(task, start, examples, learning_rate, rng, local_step=step)
    return _with_buffers(bases.detach().cpu(), result), result


def _with_buffers(parameters: Tensor, result: LocalResult) -> Tensor:
    """Append θ's buffers to the parameters of k models, (k, num_parameters)."""
    buffers = result.weights[parameters.shape[1] :].expand(len(parameters), -1)
    return torch.cat([parameters, buffers], dim=1)


@dataclass(frozen=True)
class FedBasisSettings(Settings):
    """The bases and the means against their collapse.

    Attributes
    ----------
    num_bases
        K, without the major basis; traffic is K or K + 1 times FedAvg's. 3, 4 or 8 in
        the paper; 1 without a major basis is FedAvg.
    major_basis
        Whether v', like the global model of FedAvg, is half of every combination.
    blocks
        Blocks with a combination each. ``layers``: each layer and the head;
        ``stages``: each sequence of layers and the head, as in the paper, where
        ResNet-18 has four stages; ``whole``: the whole model.
    coordinate_descent
        Whether a client trains its combination first and then the bases, or both
        together.
    temperature
        τ of the combination with which the bases are trained, (0, 1]; 1 does not
        sharpen it.
    combination_learning_rate
        Learning rate of ψ; useful from 0.1 to 10.
    combination_epochs
        Passes over the training data for ψ, before those for the bases.
    warm_start_fraction
        The fraction of the rounds, at the start, that train FedAvg's model, from which
        the bases are made; 0 starts with random bases.
    unseen_epochs
        Passes over a client's data for its combination after the last round, of seen
        clients too, since no combination is kept between rounds.
    personal_classifier
        Whether these passes train the whole head as well, at the learning rate of the
        first round.
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
    needs_num_rounds = "its warm start is a part of all rounds"
    needs_sgd = "its steps on the basis are those of SGD"
    source = "Chen et al. 2023, section 4, Algorithms 1 and 2"
    upload = "K + 1 (num_bases)"
    download = "K + 1 (num_bases)"
    server_state = "K + 1 (num_bases)"
    unseen = "a combination of the bases, and a head, learned on its own data"
    learns_from_validation = "all"
    trains_unseen_from_start = True
    reference_title = "FedBasis (uniform combination)"
    holds_all_updates = True
    state_type = BasesState
    payload_type = Bases
    update_type = BasesUpdate

    settings: FedBasisSettings

    @staticmethod
    @override
    def check(settings: FedBasisSettings, experiment: Experiment) -> Sequence[Problem]:
        buffered = isinstance(experiment.training.timing, BufferedTiming)
        if not buffered or settings.num_models == 1 or not settings.warm_start_fraction:
            return ()
        message = (
            "found buffered, expected rounds, or a method.warm_start_fraction of 0: a "
            "late update of the warm start has one model when the server has bases"
        )
        return (Problem("training.timing", message),)

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> BasesState:
        seed = rng.child("clusters").entropy(num_bytes=6)
        if num_warm_rounds(self.task, self.settings) > 0:
            participation = self.task.training.participation
            least = self.settings.num_bases
            if participation * len(clients) + 0.5 < least:
                raise RunError(
                    f"found {len(clients)} clients with a participation of "
                    f"{participation:g}, expected at least {least} participants in a "
                    "round, one for each of method.num_bases; lower num_bases, or "
                    "raise training.participation"
                )
            return BasesState((self.task.initial_weights,), 0, seed)
        others = range(1, self.settings.num_models)
        fresh = [self.task.fresh_weights(rng.child("basis", k)) for k in others]
        return BasesState((self.task.initial_weights, *fresh), 0, seed)

    @override
    def broadcast(self, state: BasesState, client_id: str, rng: RandomKey) -> Bases:
        return Bases(state.models)

    @override
    def local_update(
        self, payload: Bases, data: ClientData, rate: float, rng: RandomKey
    ) -> BasesUpdate:
        _, update = local_round(
            self.task, self.settings, payload, data.train, rate, rng
        )
        return update

    @override
    def personalize(
        self, payload: Bases, client_state: Any, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        head = self.task.head_mask if self.settings.personal_classifier else None
        to_learn = len(payload.models) > 1 or head is not None
        epochs = self.settings.unseen_epochs if to_learn else 0

        def served(examples: Examples) -> ModelPredictor:
            combination = _combination(self.task, self.settings, payload)
            rate = self.task.first_rate
            weights = learn_combination(
                self.task, combination, examples, rate, rng, epochs, free=head
            ).weights
            return ModelPredictor(self.task, weights, combination.describe(free=head))

        return on_both_splits(data, served)

    @override
    def update_problem(self, payload: Bases, update: BasesUpdate) -> str | None:
        return unlike_sent(payload, update, "models")

    @override
    def aggregate(self, state: BasesState, updates: Updates[BasesUpdate]) -> BasesState:
        num_rounds, num_bases = state.num_rounds + 1, self.settings.num_bases
        has_bases = len(state.models) == self.settings.num_models
        if has_bases or num_rounds < num_warm_rounds(self.task, self.settings):
            models = mean_models(update for _, update in updates)
            return BasesState(models, num_rounds, state.seed)
        # Sorted, since the first centre of the clusters is drawn by position.
        replies = hold(updates)
        models = mean_models(replies)
        if len(replies) >= num_bases:  # with fewer, the warm start lasts another round
            center = models[0][: self.task.model.num_parameters]
            bases = clustered(replies, center, num_bases, RandomKey(state.seed))
            models = (*models, *bases) if self.settings.major_basis else bases
        return BasesState(models, num_rounds, state.seed)


def num_warm_rounds(task: Task, settings: FedBasisSettings) -> int:
    """Return the number of rounds of the warm start; 0 without one."""
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
    """Train a client in a round; return α, shape (K, B), and the update."""
    combination = _combination(task, settings, payload)
    temperature, epochs = settings.temperature, settings.combination_epochs
    if len(payload.models) == 1:
        result = local_sgd(task, payload.models[0], examples, learning_rate, rng)
        models = result.weights[None]
    elif settings.coordinate_descent:
        combination_rng = rng.child("combination")
        learn_combination(
            task, combination, examples, learning_rate, combination_rng, epochs
        )
        models, result = train_bases(
            task, combination, temperature, examples, learning_rate, rng
        )
    else:
        models, result = train_jointly(
            task, combination, temperature, examples, learning_rate, rng
        )
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
