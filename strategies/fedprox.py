"""FedProx: FedAvg whose clients are pulled towards the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous
Networks", MLSys 2020, Algorithm 2; heterogeneity-talk-fedem-knnper.txt. With the global
model w of the round, a client minimises f(y) + μ/2 ||y - w||² by steps

    y ← (y - η g(y) + η μ w) / (1 + η μ)

where g is the gradient of f on a mini-batch, with that of weight decay.

Departures: the pull is taken at the end of a step, see
`knnper.strategies.core.training`; the number of local steps is fixed, where the paper
allows any inexact solution; clients are drawn uniformly and weighted by their number of
examples, as in FedAvg.
"""

from dataclasses import dataclass, replace

from knnper.data.examples import ClientData
from knnper.experiment import NonNegativeFloat, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, MethodSpec, NoSettings
from knnper.strategies.core.records import ModelPayload, ModelUpdate, NoState
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd, pull
from knnper.strategies.fedavg import fedavg


@dataclass(frozen=True)
class FedProxSettings(Settings):
    """How far a client may go.

    Attributes
    ----------
    prox_weight
        μ, 0.001 to 1 in the paper; 0 is FedAvg.
    """

    prox_weight: NonNegativeFloat = 0.1


def fedprox(task: Task, settings: FedProxSettings) -> Method:
    """Return FedProx on ``task``."""

    def client_update(
        payload: ModelPayload,
        client_state: NoState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[NoState, ModelUpdate]:
        rate = task.training.learning_rate_at(server_round)
        decay = task.training.weight_decay
        towards = pull(payload.weights, settings.prox_weight, rate, decay)
        trained = local_sgd(
            task, payload.weights, data.train, rate, rng, gradient_hook=towards
        )
        update = ModelUpdate(trained.weights, len(data.train), trained.train_loss)
        return NoState(), update

    return replace(fedavg(task, NoSettings()), client_update=client_update)


SPEC = MethodSpec(
    title="FedProx",
    summary="One global model; clients are pulled towards it while they train.",
    source="Li et al. 2020, Algorithm 2",
    build=fedprox,
    upload="1",
    download="1",
    client_state="0",
    server_state="1",
    unseen="the global model",
    reference_title="FedProx",
    settings_type=FedProxSettings,
    ends_with_global_model=True,
)
