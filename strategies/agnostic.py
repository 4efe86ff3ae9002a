"""Agnostic FL: one global model for the worst mixture of the clients' domains.

Mohri, Sivek, Suresh, "Agnostic Federated Learning", ICML 2019, Algorithm
Stochastic-AFL; Mansour et al. 2020, appendices B.2 and F.2. A domain is a client, a
group of clients or a label. For domains d with mean losses L_d the game

    min_w max_λ Σ_d λ_d L_d(w),    λ in the simplex,

is solved by stochastic gradient steps: a descent on w and, at the same point,

    λ ← Π(λ + γ_λ L(w)),    Π the projection onto the simplex.

In the federated form (Ro et al., "Communication-Efficient Agnostic Federated
Averaging", 2021) clients make several local steps. With p_d the fraction of all
examples that are of domain d, an example of d has the factor λ_d / p_d. The factor acts
on the example's loss if its client has several domains, and on the client's weight in
the mean of the models. λ starts at p, so that γ_λ = 0 is FedAvg.

p counts the clients that have replied so far, and λ covers their domains. If S of the D
domains reply in a round, the step on λ takes (D / S) (L_d - b) for these and 0 for the
others, with b the mean loss of the previous round. This is the paper's stochastic
gradient, which draws one domain, for any number of domains. Subtracting b changes
nothing in a full gradient, because the projection removes it; here it keeps domains
that replied from gaining on all others.

Departures from the paper:

- The sum over replies is renormalised, as in FedAvg.
- If no example of any reply has λ_d > 0, w stays unchanged.
- The paper averages w and λ over all rounds; here the last values are used.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, Settings
from knnper.strategies.core.averaging import RunningMean, Updates, denominator
from knnper.strategies.core.method import wrong_shape
from knnper.strategies.core.records import ModelUpdate, Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fedavg import FedAvg


@dataclass(frozen=True)
class AgnosticSettings(Settings):
    """The domains, and the learning rate of their weights.

    Attributes
    ----------
    domain
        ``client``: each client is a domain, or each of ``groups``. ``label``: each
        label is a domain.
    groups
        Names of the seen clients in each group, by the group's name. A client in no
        group is a domain of its own.
    domain_learning_rate
        γ_λ, the step on λ for a loss of 1; 0.05 in Mansour et al. 2020, appendix F.2,
        with two domains; smaller for many. 0 is FedAvg.
    """

    domain: Literal["client", "label"] = "client"
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    domain_learning_rate: NonNegativeFloat = 0.05


@dataclass(frozen=True)
class AgnosticState(Record):
    """The server's state. A domain is a group of clients and a kind of example.

    If domains are clients there is one kind; if they are labels there is one group.
    """

    weights: Tensor  # w, shape (num_weights,)
    factors: Tensor  # λ_d / p_d, shape (num_groups, num_kinds); 1 if unknown yet
    group_of: dict[str, int]  # the group of each seen client, by name
    # Training examples of each kind, shape (num_clients, num_kinds), in the order of
    # ``group_of``; 0 until a client has replied.
    examples: Tensor
    typical_loss: float  # b, the mean over the domains that replied in the last round


@dataclass(frozen=True)
class AgnosticPayload(Record):
    """The payload of a client."""

    weights: Tensor  # w, shape (num_weights,)
    label_factors: Tensor | None  # λ_d / p_d of each label; None if domains are clients


@dataclass(frozen=True)
class AgnosticUpdate(ModelUpdate):
    """The update of a client."""

    shares: Tensor  # the fraction of its examples of each kind, shape (num_kinds,)
    losses: Tensor  # mean loss of the received w by kind, shape (num_kinds,); 0 if none


class Agnostic(FedAvg):
    """One global model, trained for the worst mixture of domains."""

    title = "Agnostic FL"
    source = "Mohri et al. 2019, Stochastic-AFL; three-approaches, appendices B.2, F.2"
    needs_metrics = True
    state_type = AgnosticState
    payload_type = AgnosticPayload
    update_type = AgnosticUpdate

    settings: AgnosticSettings

    def __init__(self, task: Task, settings: AgnosticSettings) -> None:
        super().__init__(task, settings)
        self._by_label = settings.domain == "label"
        self._num_kinds = task.spec.num_classes if self._by_label else 1

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> AgnosticState:
        group_of = dict.fromkeys(clients, 0)
        if not self._by_label:
            group_of = groups_of(clients, self.settings.groups)
        num_groups = max(group_of.values(), default=0) + 1
        return AgnosticState(
            weights=self.task.initial_weights,
            factors=torch.ones(num_groups, self._num_kinds),
            group_of=group_of,
            examples=torch.zeros(len(clients), self._num_kinds),
            typical_loss=0.0,
        )

    @override
    def broadcast(
        self, state: AgnosticState, client_id: str, rng: RandomKey
    ) -> AgnosticPayload:
        factors = state.factors[0] if self._by_label else None
        return AgnosticPayload(state.weights, factors)

    @override
    def local_update(
        self, payload: AgnosticPayload, data: ClientData, rate: float, rng: RandomKey
    ) -> AgnosticUpdate:
        labels = data.train.labels
        kinds = labels if self._by_label else torch.zeros_like(labels)
        shares, losses = shares_and_losses(
            self.task, payload.weights, data.train, kinds, self._num_kinds
        )
        factors = example_weights_of(payload.label_factors, data.train)
        trained = local_sgd(
            self.task, payload.weights, data.train, rate, rng, example_weights=factors
        )
        weights, loss = trained.weights, trained.train_loss
        return AgnosticUpdate(weights, len(data.train), loss, shares, losses)

    @override
    def aggregate(
        self, state: AgnosticState, updates: Updates[AgnosticUpdate]
    ) -> AgnosticState:
        rows = {client: row for row, client in enumerate(state.group_of)}
        mean, examples = RunningMean(), state.examples.clone()
        counts = torch.zeros_like(state.factors, dtype=torch.float64)
        losses, is_moved = counts.clone(), False
        for client, update in updates:
            group = state.group_of[client]
            shares = update.shares.double().clamp_min(0)
            kind_counts = update.num_examples * shares / denominator(shares.sum())
            examples[rows[client]] = kind_counts
            counts[group] += kind_counts
            losses[group] += kind_counts * update.losses.double()
            # Exactly 1 if all factors are 1, since the two sums are equal then.
            factor = float(
                (kind_counts * state.factors[group]).sum() / kind_counts.sum()
            )
            if factor > 0:
                mean.add(update.weights, update.num_examples * factor)
                is_moved = True
        weights = mean.result() if is_moved else state.weights
        moved = replace(state, weights=weights, examples=examples)
        return _step_on_domains(
            moved, losses, counts, self.settings.domain_learning_rate
        )

    @override
    def update_problem(
        self, payload: AgnosticPayload, update: AgnosticUpdate
    ) -> str | None:
        size = (self._num_kinds,)
        return wrong_shape(update, shares=size, losses=size)

    @staticmethod
    @override
    def check(settings: AgnosticSettings, experiment: Experiment) -> Sequence[Problem]:
        messages, groups = list[str](), settings.groups
        if groups and settings.domain == "label":
            messages += [
                "found groups of clients with `domain: label`, expected one of both"
            ]
        listed = Counter(client for group in groups.values() for client in group)
        repeated = [client for client, count in listed.items() if count > 1]
        if repeated:
            messages += [
                f"found {', '.join(repeated)} more than once, expected every client "
                "in at most one group; remove it from the others"
            ]
        return [Problem("method.groups", message) for message in messages]


def _step_on_domains(
    state: AgnosticState, loss_sums: Tensor, counts: Tensor, rate: float
) -> AgnosticState:
    """Make the step on λ, with p from the state's ``examples``."""
    groups = torch.tensor(list(state.group_of.values()))
    totals = torch.zeros_like(counts).index_add_(0, groups, state.examples.double())
    known, present = totals > 0, counts > 0
    if not bool(present.any()):
        return state
    losses = loss_sums / counts.where(present, 1.0)
    excess = (losses - state.typical_loss).where(present, 0.0)[known]
    share = totals[known] / totals.sum()
    before = state.factors[known] * share
    # Renormalised, since more domains may be known than in the last round.
    before = before / denominator(before.sum())
    scale = known.sum() / present.sum()
    factors = torch.ones_like(state.factors)
    after = project_to_simplex(before + rate * scale * excess)
    factors[known] = (after / share).float()
    return replace(state, factors=factors, typical_loss=float(losses[present].mean()))


def groups_of(
    clients: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Return the number of each client's group, which is named or its own."""
    empty = [name for name, members in groups.items() if not {*members} & {*clients}]
    if empty:
        message = (
            f"found none of the seen clients in {', '.join(empty)}, expected at least "
            f"one; seen clients are named {', '.join(clients[:3])} and so on"
        )
        raise ConfigError([Problem("method.groups", message)])
    named = {client: name for name, members in groups.items() for client in members}
    keys = [(client in named, named.get(client, client)) for client in clients]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return {client: numbers[key] for client, key in zip(clients, keys, strict=True)}


def shares_and_losses(
    task: Task, weights: Tensor, examples: Examples, kinds: Tensor, num_kinds: int
) -> tuple[Tensor, Tensor]:
    """Return the fraction and the mean loss of each kind of example; 0 without any."""
    losses = task.losses(weights, examples)
    counts = torch.bincount(kinds, minlength=num_kinds)
    sums = torch.zeros(num_kinds).index_add_(0, kinds, losses)
    return counts / max(1, len(examples)), sums / counts.clamp_min(1)


def example_weights_of(
    label_factors: Tensor | None, examples: Examples
) -> Tensor | None:
    """Return each example's factor, shape (n,), with mean 1 unless all are 0."""
    if label_factors is None:
        return None
    factors = label_factors[examples.labels]
    return factors / denominator(factors.mean())


def project_to_simplex(point: Tensor) -> Tensor:
    """Return the point of the simplex that is nearest to ``point``.

    Duchi, Shalev-Shwartz, Singer, Chandra, "Efficient Projections onto the l1-Ball for
    Learning in High Dimensions", ICML 2008, Figure 1.
    """
    # A shift of all coordinates changes nothing, and large ones would lose the 1.
    shifted = point - point.max()
    descending = shifted.sort(descending=True).values
    thresholds = (descending.cumsum(0) - 1) / torch.arange(1, len(point) + 1)
    num_positive = int((descending > thresholds).sum())
    return (shifted - thresholds[num_positive - 1]).clamp_min(0)
