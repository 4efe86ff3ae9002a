"""Linear probe (LP): a new head on the representation of what a client is served.

fedbasis-pflbed.txt, section 6: "linear probe (LP) that trains a linear classifier
only". The head starts from the served model's.
"""

from dataclasses import dataclass

from knnper.experiment import PositiveFloat, PositiveInt, Settings
from knnper.strategies.core.method import Method, PersonalizerSpec
from knnper.strategies.core.task import Task
from knnper.strategies.fine_tuning import FineTuningSettings, fine_tuned


@dataclass(frozen=True)
class LinearProbeSettings(Settings):
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
    learning_rate: PositiveFloat | None = None


def linearly_probed(
    task: Task, method: Method, settings: LinearProbeSettings
) -> Method:
    """Return ``method`` whose clients train the head of what they would be served."""
    tuning = FineTuningSettings(settings.num_epochs, settings.learning_rate)
    return fine_tuned(task, method, tuning, trainable=task.head_mask)


ON_TOP = PersonalizerSpec(
    title="LP",
    summary="The served model with a head trained on the client's data.",
    source="fedbasis-pflbed.txt, section 6",
    settings_type=LinearProbeSettings,
    apply=linearly_probed,
    unseen="trains a head like any other client",
    needs_one_model=True,
)
