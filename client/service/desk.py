"""What every endpoint works with."""

from dataclasses import dataclass

from client.service.holder import Holder
from client.service.inputs import InputReader
from client.service.limits import Limits
from client.service.metrics import Metrics
from client.service.served import Model
from client.service.workers import Workers


@dataclass(frozen=True)
class Desk:
    """One service's parts.

    Attributes
    ----------
    client_name
        Of the client whose model and memory are served.
    holder
        Has what is served now.
    limits
        What a request may cost.
    readers, writers
        Threads that predict and look, and the one thread that changes the store.
    metrics
        What is counted.
    """

    client_name: str
    holder: Holder
    limits: Limits
    readers: Workers
    writers: Workers
    metrics: Metrics

    def input_reader(self, model: Model) -> InputReader:
        """Return what reads a model's inputs."""
        return InputReader(model.spec, self.limits)


def open_desk(client_name: str, holder: Holder, limits: Limits) -> Desk:
    """Return the parts of a service that is about to start."""
    waiting, patience = limits.max_waiting, limits.queue_timeout_s
    return Desk(
        client_name,
        holder,
        limits,
        readers=Workers("predict", limits.num_readers, waiting, patience),
        writers=Workers("store", 1, waiting, patience),
        metrics=Metrics(holder),
    )
