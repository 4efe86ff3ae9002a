"""Multi-Krum: the mean of the models that are closest to their neighbours.

Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine
Tolerant Gradient Descent", NeurIPS 2017, section 5: the scores are Krum's, and the m
clients with the smallest are averaged. m = 1 is Krum, m = n the mean of all.

All updates of a round are held at once. Of equal scores the first client's is the
smaller.

Flower's `MultiKrum` neither asks for n ≥ 2 f + 3 nor for n ≥ m; here a round of fewer
is an error. Departures: the mean weights the selected by their examples, which is what
Flower does, so that with m = n it is FedAvg; the paper weights them equally. Distances
cover all weights, buffers such as BatchNorm's running statistics too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from knnper.experiment import NonNegativeInt, PositiveInt, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import RunningMean, hold, require
from knnper.strategies.core.method import Method, MethodSpec, NoSettings
from knnper.strategies.core.records import ModelState, ModelUpdate
from knnper.strategies.core.robust import squared_distances
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import fedavg
from knnper.strategies.krum import lowest, require_neighbours


@dataclass(frozen=True)
class MultiKrumSettings(Settings):
    """Whom the server expects, and how many it takes.

    Attributes
    ----------
    num_malicious
        f, clients in a round that may send anything; at most (n - 3) / 2 of n. The
        paper has a third or fewer. 0 expects none.
    num_selected
        m, the clients that are averaged; null is n - f of the n in a round, as many as
        are not expected to be bad.
    """

    num_malicious: NonNegativeInt = 0
    num_selected: PositiveInt | None = None


def multikrum(task: Task, settings: MultiKrumSettings) -> Method:
    """Return Multi-Krum on ``task``."""
    base = fedavg(task, NoSettings())

    def init(clients: Sequence[str], rng: RandomKey) -> ModelState:
        _require_enough(len(clients), settings)
        state: ModelState = base.init(clients, rng)
        return state

    def aggregate(
        state: ModelState, updates: Iterable[tuple[str, ModelUpdate]]
    ) -> ModelState:
        held = hold(updates)
        _require_enough(len(held), settings)
        num_malicious = settings.num_malicious
        num_selected = settings.num_selected or len(held) - num_malicious
        mean = RunningMean()
        for position in lowest(squared_distances(held), num_malicious)[:num_selected]:
            mean.add(held[position].weights, held[position].num_examples)
        return ModelState(mean.result())

    return replace(base, init=init, aggregate=aggregate)


def _require_enough(num_clients: int, settings: MultiKrumSettings) -> None:
    require_neighbours(num_clients, settings.num_malicious)
    if settings.num_selected is not None:
        reason = f"method.num_selected is {settings.num_selected}"
        require(settings.num_selected, num_clients, reason)


SPEC = MethodSpec(
    title="Multi-Krum",
    summary="The mean of the models that are closest to their neighbours.",
    source="Blanchard et al. 2017, section 5",
    build=multikrum,
    upload="1",
    download="1",
    client_state="0",
    server_state="1",
    unseen="the global model",
    reference_title="Multi-Krum",
    settings_type=MultiKrumSettings,
    holds_all_updates=True,
    ends_with_global_model=True,
)
