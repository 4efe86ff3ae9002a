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

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from knnper.experiment import PositiveInt
from knnper.strategies.core.averaging import RunningMean, require, squared_distances
from knnper.strategies.core.records import ModelUpdate
from knnper.strategies.krum import Krum, KrumSettings, lowest


@dataclass(frozen=True)
class MultiKrumSettings(KrumSettings):
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

    num_selected: PositiveInt | None = None


class MultiKrum(Krum):
    """The mean of the models that are closest to their neighbours."""

    title = "Multi-Krum"
    source = "Blanchard et al. 2017, section 5"

    settings: MultiKrumSettings

    def require_enough(self, num_clients: int) -> None:
        super().require_enough(num_clients)
        least = self.settings.num_selected
        if least is not None:
            require(least, num_clients, f"method.num_selected is {least}")

    def combined(self, held: Sequence[ModelUpdate]) -> Tensor:
        num_malicious = self.settings.num_malicious
        num_selected = self.settings.num_selected or len(held) - num_malicious
        mean = RunningMean()
        for position in lowest(squared_distances(held), num_malicious)[:num_selected]:
            mean.add(held[position].weights, held[position].num_examples)
        return mean.result()
