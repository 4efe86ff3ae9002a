"""FedEM: every client is served its own mixture of a few shared models.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture
of Distributions", NeurIPS 2021, Algorithm 1; Marfoq 2023 (talk),
"Federated Expectation Maximization". With components m = 1 ... M and the examples
(x_i, y_i) of a client:

    E-step  q_i(m) ∝ π_m exp(-loss(h_m(x_i), y_i))
    M-step  π_m = mean_i q_i(m), and h_m trained with q_i(m) as weight of example i

The server averages each component over the clients, and a client serves Σ_m π_m h_m(x).
An unseen client makes the same steps on π alone (the talk's "Unseen Clients").

Departure from the paper: it draws separate mini-batches for each component. Here all
components share mini-batches, so that FedEM with one component is FedAvg.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.settings import PositiveInt, Settings
from knnper.strategies.core.averaging import Updates, average_each
from knnper.strategies.core.method import Method, unlike_sent
from knnper.strategies.core.predictors import MixturePredictor, Predictor
from knnper.strategies.core.records import Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd


@dataclass(frozen=True)
class FedEMSettings(Settings):
    """The size of the mixture.

    Attributes
    ----------
    num_components
        M, the number of shared models, useful from 2 to 5; traffic and training cost M
        times FedAvg's. 3 in the paper; 1 is FedAvg.
    unseen_steps
        E-steps, each with an M-step on π alone, of an unseen client. 1 is a single
        pass, as for any other client; more steps come closer to the π of maximum
        likelihood.
    """

    num_components: PositiveInt = 3
    unseen_steps: PositiveInt = 1


@dataclass(frozen=True)
class Components(Record):
    """The shared models: the state of the server, and the payload of every client."""

    components: tuple[Tensor, ...]  # M tensors of shape (num_weights,)


@dataclass(frozen=True)
class MixtureState(Record):
    """The state that a client keeps between rounds."""

    mixture_weights: Tensor  # π, shape (M,), summing to 1


@dataclass(frozen=True)
class ComponentsUpdate(Record):
    """The update of a client."""

    components: tuple[Tensor, ...]  # trained, M tensors of shape (num_weights,)
    num_examples: int
    train_loss: float  # mean over the mini-batches of Σ_m q_i(m) loss(h_m(x_i), y_i)


class FedEM(Method):
    """Each client mixes the predictions of a few shared models with its own weights."""

    title = "FedEM"
    needs_cross_entropy = "its responsibilities take a loss to be -log p(y|x)"
    source = "Marfoq et al. 2021, Algorithm 1"
    upload = "M (num_components)"
    download = "M (num_components)"
    client_state = "0 (M numbers)"
    server_state = "M (num_components)"
    unseen = "the shared models, mixed by E-steps and M-steps on its own data"
    learns_from_validation = "all"
    reference_title = "FedEM (uniform mixture)"
    serves_one_model = False
    takes_mean = True
    personalizes_by_inference = True
    state_type = Components
    payload_type = Components
    update_type = ComponentsUpdate
    client_state_type = MixtureState

    settings: FedEMSettings

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> Components:
        others = range(1, self.settings.num_components)
        fresh = [self.task.fresh_weights(rng.child("component", m)) for m in others]
        return Components((self.task.initial_weights, *fresh))

    @override
    def client_update(
        self,
        payload: Components,
        client_state: MixtureState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[MixtureState, ComponentsUpdate]:
        rate = self.task.training.learning_rate_at(server_round)
        prior = self._mixture_weights(client_state)
        losses = example_losses(self.task, payload.components, data.train)
        shares = responsibilities(losses, prior)
        trained = [
            local_sgd(self.task, weights, data.train, rate, rng, example_weights=share)
            for weights, share in zip(payload.components, shares.T, strict=True)
        ]
        update = ComponentsUpdate(
            components=tuple(result.weights for result in trained),
            num_examples=len(data.train),
            train_loss=sum(result.train_loss for result in trained),
        )
        return MixtureState(_mean_or(shares, prior)), update

    @override
    def personalize(
        self,
        payload: Components,
        client_state: MixtureState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Predictor:
        num_steps = self.settings.unseen_steps if client_state is None else 1
        start = self._mixture_weights(client_state)
        components = payload.components
        of_train, of_validation = (
            example_losses(self.task, components, examples)
            for examples in (data.train, data.validation)
        )

        def served(losses: Tensor) -> MixturePredictor:
            mixture_weights = _fitted(losses, start, num_steps)
            shares = enumerate(mixture_weights.tolist())
            chosen = {f"mixture_weight_{m}": share for m, share in shares}
            return MixturePredictor(self.task, components, mixture_weights, chosen)

        alone = (lambda: served(of_train)) if len(data.validation) else None
        both = served(torch.cat([of_train, of_validation]))
        return replace(both, trained_alone=alone)

    def _mixture_weights(self, client_state: MixtureState | None) -> Tensor:
        count = self.settings.num_components
        if client_state is None:
            return torch.full((count,), 1 / count)
        return client_state.mixture_weights

    @override
    def aggregate(
        self, state: Components, updates: Updates[ComponentsUpdate]
    ) -> Components:
        weighted = ((update.components, update.num_examples) for _, update in updates)
        return Components(average_each(weighted))

    @override
    def update_problem(
        self, payload: Components, update: ComponentsUpdate
    ) -> str | None:
        return unlike_sent(payload, update, "components")


def example_losses(
    task: Task, components: Sequence[Tensor], examples: Examples
) -> Tensor:
    """Return loss(h_m(x_i), y_i) for n examples and M components, shape (n, M)."""
    losses = [task.losses(weights, examples) for weights in components]
    return torch.stack(losses, dim=1)


def responsibilities(losses: Tensor, mixture_weights: Tensor) -> Tensor:
    """Make the E-step, q_i(m) ∝ π_m exp(-loss(h_m(x_i), y_i)), shape (n, M)."""
    # In logarithms, since exp(-loss) of a badly fitting component underflows.
    return torch.softmax(mixture_weights.log() - losses, dim=1)


def _fitted(losses: Tensor, start: Tensor, num_steps: int) -> Tensor:
    """Return π, shape (M,), after ``num_steps`` E-steps and M-steps from ``start``."""
    mixture_weights = start
    for _ in range(num_steps):
        uniform = torch.full_like(start, 1 / len(start))
        mixture_weights = _mean_or(responsibilities(losses, mixture_weights), uniform)
    return mixture_weights


def _mean_or(shares: Tensor, default: Tensor) -> Tensor:
    """Return the mean of the rows of ``shares``, or ``default`` if there are none."""
    return shares.mean(dim=0) if len(shares) else default
