"""SCAFFOLD: FedAvg whose local steps are corrected for the clients' drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning", ICML 2020, Algorithm 1 with option II. Local steps
and new control variates are

    y_i ← y_i - η_l (g_i(y_i) - c_i + c)
    c_i⁺ = c_i - c + (x - y_i) / (K η_l)

and the server's are, over the set S of clients that replied, N being all seen clients,

    x ← x + η_g Σ_i (n_i / Σ n) (y_i - x)
    c ← c + (|S| / N) mean_i (c_i⁺ - c_i)

Departures: the mean of the models weights each client by its number of examples, so
that SCAFFOLD without corrections is FedAvg; the paper weights clients equally. Control
variates cover parameters; buffers such as BatchNorm's running statistics have no
gradient and are averaged only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.data.examples import ClientData
from knnper.errors import Problem
from knnper.experiment import Experiment, PositiveFloat, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import RunningMean
from knnper.strategies.core.method import Method, MethodSpec, Predictor, of_shapes
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd


@dataclass(frozen=True)
class ScaffoldSettings(Settings):
    """What the server does with the clients' mean.

    Attributes
    ----------
    global_learning_rate
        η_g, the step from the old model towards the clients' mean. 1 takes the mean
        itself, as FedAvg does and as in the paper's experiments.
    """

    global_learning_rate: PositiveFloat = 1.0


@dataclass(frozen=True)
class ScaffoldState(Record):
    """The server's state.

    Attributes
    ----------
    weights
        x, shape (num_weights,).
    control
        c, shape (num_parameters,).
    num_clients
        N, the seen clients, whether or not they have replied yet.
    """

    weights: Tensor
    control: Tensor
    num_clients: int


@dataclass(frozen=True)
class ScaffoldPayload(Record):
    """What every client gets.

    Attributes
    ----------
    weights
        x, shape (num_weights,).
    control
        c, shape (num_parameters,).
    """

    weights: Tensor
    control: Tensor


@dataclass(frozen=True)
class ScaffoldClientState(Record):
    """What a client keeps between rounds.

    Attributes
    ----------
    control
        c_i, shape (num_parameters,); zero before its first round.
    """

    control: Tensor


@dataclass(frozen=True)
class ScaffoldUpdate(Record):
    """What a client sends back.

    Attributes
    ----------
    weights
        y_i, shape (num_weights,).
    control_change
        c_i⁺ - c_i, shape (num_parameters,).
    num_examples, train_loss
        See `Update`.
    """

    weights: Tensor
    control_change: Tensor
    num_examples: int
    train_loss: float


def scaffold(task: Task, settings: ScaffoldSettings) -> Method:
    """Return SCAFFOLD on ``task``."""
    num_parameters = task.model.num_parameters

    def init(clients: Sequence[str], rng: RandomKey) -> ScaffoldState:
        control = torch.zeros(num_parameters)
        return ScaffoldState(task.initial_weights, control, len(clients))

    def broadcast(
        state: ScaffoldState, client_id: str, rng: RandomKey
    ) -> ScaffoldPayload:
        return ScaffoldPayload(state.weights, state.control)

    def client_update(
        payload: ScaffoldPayload,
        client_state: ScaffoldClientState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[ScaffoldClientState, ScaffoldUpdate]:
        rate = task.training.learning_rate_at(server_round)
        zero = torch.zeros(num_parameters)
        old = zero if client_state is None else client_state.control
        correction = (payload.control - old).to(task.model.device)

        def correct(gradient: Tensor, parameters: Tensor) -> None:
            gradient.add_(correction)

        trained = local_sgd(
            task, payload.weights, data.train, rate, rng, gradient_hook=correct
        )
        change = zero
        if trained.num_steps > 0:
            moved = (payload.weights - trained.weights)[:num_parameters]
            change = moved / (trained.num_steps * rate) - payload.control
        update = ScaffoldUpdate(
            trained.weights, change, len(data.train), trained.train_loss
        )
        return ScaffoldClientState(old + change), update

    def aggregate(
        state: ScaffoldState, updates: Iterable[tuple[str, ScaffoldUpdate]]
    ) -> ScaffoldState:
        return _aggregate(state, updates, settings.global_learning_rate)

    def personalize(
        payload: ScaffoldPayload,
        client_state: ScaffoldClientState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Predictor:
        return ModelPredictor(task, payload.weights)

    return Method(
        init=init,
        broadcast=broadcast,
        client_update=client_update,
        aggregate=aggregate,
        personalize=personalize,
        state_type=ScaffoldState,
        payload_type=ScaffoldPayload,
        update_type=ScaffoldUpdate,
        num_rounds=task.training.num_rounds,
        client_state_type=ScaffoldClientState,
        serves_global_model=True,
        personalizes_by_inference=True,
        update_problem=of_shapes(control_change=(num_parameters,)),
    )


def _aggregate(
    state: ScaffoldState,
    updates: Iterable[tuple[str, ScaffoldUpdate]],
    global_learning_rate: float,
) -> ScaffoldState:
    models, changes, num_replies = RunningMean(), RunningMean(), 0
    for _, update in updates:
        models.add(update.weights, update.num_examples)
        changes.add(update.control_change, 1)
        num_replies += 1
    weights = models.result_float64()
    # Buffers follow the parameters: a running variance must not be extrapolated.
    parameters = slice(0, len(state.control))
    kept = (1 - global_learning_rate) * state.weights[parameters].double()
    weights[parameters] = kept + global_learning_rate * weights[parameters]
    fraction = num_replies / state.num_clients
    control = state.control.double() + fraction * changes.result_float64()
    return ScaffoldState(weights.float(), control.float(), state.num_clients)


def _check(experiment: Experiment) -> Sequence[Problem]:
    momentum = experiment.training.momentum
    if momentum == 0:
        return ()
    return (
        Problem(
            "training.momentum",
            f"found {momentum}, expected 0 with scaffold: its control variates are "
            "estimated as (x - y) / (K η), the mean gradient of plain SGD only; "
            "remove the setting or choose another method",
        ),
    )


SPEC = MethodSpec(
    title="SCAFFOLD",
    summary="One global model; control variates correct the clients' drift.",
    source="Karimireddy et al. 2020, Algorithm 1, option II",
    build=scaffold,
    upload="2",
    download="2",
    client_state="1",
    server_state="2",
    unseen="the global model",
    reference_title="SCAFFOLD",
    settings_type=ScaffoldSettings,
    ends_with_global_model=True,
    check=_check,
)
