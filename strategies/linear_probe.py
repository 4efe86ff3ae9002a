"""Linear probe (LP): a new head on the representation of what a client is served.

Chen et al. 2023, section 6: "linear probe (LP) that trains a linear classifier
only". The head starts from the served model's.
"""

from dataclasses import dataclass

from torch import Tensor

from knnper.experiment import PositiveInt
from knnper.strategies.fine_tuning import FineTuning, FineTuningSettings


@dataclass(frozen=True)
class LinearProbeSettings(FineTuningSettings):
    """How a client trains its head.

    Attributes
    ----------
    num_epochs
        Passes over the client's training and validation data; 20 in the paper.
    learning_rate
        Of the head; null is the training section's rate in the last round. The paper's
        grid is 0.005, 0.01, 0.05.
    """

    num_epochs: PositiveInt = 20


class LinearProbe(FineTuning):
    """The served model with a head trained on the client's data."""

    title = "LP"
    source = "Chen et al. 2023, section 6"
    unseen = "trains a head like any other client"

    settings: LinearProbeSettings

    def trained_weights(self) -> Tensor:
        return self.task.head_mask
