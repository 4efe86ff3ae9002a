"""FedEM: every client is served its own mixture of a few shared models.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture
of Distributions", NeurIPS 2021, Algorithm 1; heterogeneity-talk-fedem-knnper.txt,
"Federated Expectation Maximization". With components m = 1 ... M and the examples
(x_i, y_i) of a client:

    E-step  q_i(m) ∝ π_m exp(-loss(h_m(x_i), y_i))
    M-step  π_m = mean_i q_i(m), and h_m trained with q_i(m) as weight of example i

The server averages each component over the clients, and a client is served
Σ_m π_m h_m(x). A client that took no part in training makes the same steps on π alone
(the talk's "Unseen Clients").

Departure: the paper draws mini-batches for each component apart; here all components
see the same ones, so that FedEM with one component is FedAvg.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.experiment import PositiveInt, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import RunningMean
from knnper.strategies.core.method import Method, MethodSpec, Predictor, as_sent
from knnper.strategies.core.predictors import MixturePredictor
from knnper.strategies.core.records import Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd


@dataclass(frozen=True)
class FedEMSettings(Settings):
    """The size of the mixture.

    Attributes
    ----------
    num_components
        M, the shared models: traffic and training cost M times FedAvg's. 3 in the
        paper; 1 is FedAvg.
    unseen_steps
        E-steps, each with an M-step on π alone, by which a client that took no part in
        training finds π. 1 is a single pass, as any other client makes; more come
        nearer to the π under which its data are most likely.
    """

    num_components: PositiveInt = 3
    unseen_steps: PositiveInt = 1


@dataclass(frozen=True)
class Components(Record):
    """The shared models, as the server keeps and sends them.

    Attributes
    ----------
    components
        M tensors of shape (num_weights,).
    """

    components: tuple[Tensor, ...]


@dataclass(frozen=True)
class MixtureState(Record):
    """What a client keeps between rounds.

    Attributes
    ----------
    mixture_weights
        π, shape (M,), summing to 1; uniform before its first round.
    """

    mixture_weights: Tensor


@dataclass(frozen=True)
class ComponentsUpdate(Record):
    """What a client sends back.

    Attributes
    ----------
    components
        The trained components, M tensors of shape (num_weights,).
    num_examples
        See `Update`.
    train_loss
        Mean over the mini-batches of Σ_m q_i(m) loss(h_m(x_i), y_i).
    """

    components: tuple[Tensor, ...]
    num_examples: int
    train_loss: float


def fedem(task: Task, settings: FedEMSettings) -> Method:
    """Return FedEM on ``task``."""
    num_components = settings.num_components

    def init(clients: Sequence[str], rng: RandomKey) -> Components:
        others = range(1, num_components)
        fresh = [task.fresh_weights(rng.child("component", m)) for m in others]
        return Components((task.initial_weights, *fresh))

    def broadcast(state: Components, client_id: str, rng: RandomKey) -> Components:
        return state

    def client_update(
        payload: Components,
        client_state: MixtureState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[MixtureState, ComponentsUpdate]:
        rate = task.training.learning_rate_at(server_round)
        prior = _mixture_weights(client_state, num_components)
        shares = responsibilities(task, payload.components, prior, data.train)
        trained = [
            local_sgd(task, weights, data.train, rate, rng, example_weights=share)
            for weights, share in zip(payload.components, shares.T, strict=True)
        ]
        update = ComponentsUpdate(
            components=tuple(result.weights for result in trained),
            num_examples=len(data.train),
            train_loss=sum(result.train_loss for result in trained),
        )
        return MixtureState(_mean_or(shares, prior)), update

    def personalize(
        payload: Components,
        client_state: MixtureState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Predictor:
        """Return the mixture whose π is of both splits."""
        num_steps = settings.unseen_steps if client_state is None else 1
        start = _mixture_weights(client_state, num_components)
        components = payload.components
        of_train, of_validation = (
            example_losses(task, components, examples)
            for examples in (data.train, data.validation)
        )

        def served(losses: Tensor) -> MixturePredictor:
            mixture_weights = _fitted(losses, start, num_steps)
            return mixture(task, components, mixture_weights)

        alone = (lambda: served(of_train)) if len(data.validation) else None
        both = served(torch.cat([of_train, of_validation]))
        return replace(both, trained_alone=alone)

    return Method(
        init=init,
        broadcast=broadcast,
        client_update=client_update,
        aggregate=_aggregate,
        personalize=personalize,
        state_type=Components,
        payload_type=Components,
        update_type=ComponentsUpdate,
        num_rounds=task.training.num_rounds,
        client_state_type=MixtureState,
        personalizes_by_inference=True,
        update_problem=as_sent("components"),
    )


def mixture(
    task: Task, components: Sequence[Tensor], mixture_weights: Tensor
) -> MixturePredictor:
    """Return what a client with these π, shape (M,), is served; it reports them."""
    shares = mixture_weights.tolist()
    chosen = {f"mixture_weight_{m}": share for m, share in enumerate(shares)}
    return MixturePredictor(task, components, mixture_weights, chosen)


def responsibilities(
    task: Task,
    components: Sequence[Tensor],
    mixture_weights: Tensor,
    examples: Examples,
) -> Tensor:
    """Return q_i(m) ∝ π_m exp(-loss(h_m(x_i), y_i)): the E-step.

    Parameters
    ----------
    task
        Gives the architecture; the models are in evaluation mode.
    components
        M tensors of shape (num_weights,).
    mixture_weights
        π, shape (M,).
    examples
        The n examples to share out between the components.

    Returns
    -------
    Tensor
        float32, shape (n, M); rows sum to 1.
    """
    return shares_of(example_losses(task, components, examples), mixture_weights)


def example_losses(
    task: Task, components: Sequence[Tensor], examples: Examples
) -> Tensor:
    """Return loss(h_m(x_i), y_i), shape (n, M), of n examples and M components."""
    losses = [task.losses(weights, examples) for weights in components]
    return torch.stack(losses, dim=1)


def shares_of(losses: Tensor, mixture_weights: Tensor) -> Tensor:
    """Return q_i(m), shape (n, M), from the losses (n, M) and π (M,)."""
    # In logarithms: exp(-loss) of a badly fitting component underflows.
    return torch.softmax(mixture_weights.log() - losses, dim=1)


def _mixture_weights(client_state: MixtureState | None, num_components: int) -> Tensor:
    if client_state is None:
        return torch.full((num_components,), 1 / num_components)
    return client_state.mixture_weights


def _fitted(losses: Tensor, start: Tensor, num_steps: int) -> Tensor:
    """Return π, shape (M,), after E-steps and M-steps on it from ``start``."""
    mixture_weights = start
    for _ in range(num_steps):
        uniform = torch.full_like(start, 1 / len(start))
        mixture_weights = _mean_or(shares_of(losses, mixture_weights), uniform)
    return mixture_weights


def _mean_or(shares: Tensor, default: Tensor) -> Tensor:
    """Return the mean of the rows of ``shares``, or ``default`` if there are none."""
    return shares.mean(dim=0) if len(shares) else default


def _aggregate(
    state: Components, updates: Iterable[tuple[str, ComponentsUpdate]]
) -> Components:
    means = [RunningMean() for _ in state.components]
    for _, update in updates:
        for mean, weights in zip(means, update.components, strict=True):
            mean.add(weights, update.num_examples)
    return Components(tuple(mean.result() for mean in means))


SPEC = MethodSpec(
    title="FedEM",
    summary="Each client mixes a few shared models with weights of its own.",
    source="Marfoq et al. 2021, Algorithm 1",
    build=fedem,
    upload="M (num_components)",
    download="M (num_components)",
    client_state="0 (M numbers)",
    server_state="M (num_components)",
    unseen="the shared models, mixed by E-steps and M-steps on its own data",
    reference_title="FedEM (uniform mixture)",
    settings_type=FedEMSettings,
    serves_one_model=False,
)
