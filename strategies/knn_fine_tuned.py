"""kNN-Per + FT: a local memory on the representation of a fine-tuned model.

fedbasis-pflbed.txt, section 6, row KNN-PER+FT. The paper does not say in which order;
here the client fine-tunes first and remembers with the tuned model. λ is chosen with
the model that was tuned on the training split alone, to which the validation split is
new.
"""

from dataclasses import dataclass, field

from knnper.experiment import Settings
from knnper.strategies.core.memory import KnnSettings
from knnper.strategies.core.method import Method, PersonalizerSpec
from knnper.strategies.core.task import Task
from knnper.strategies.fine_tuning import FineTuningSettings, fine_tuned
from knnper.strategies.knn_per import with_memory


@dataclass(frozen=True)
class FineTunedMemorySettings(Settings):
    """Fine-tuning, then memory.

    Attributes
    ----------
    fine_tuning
        How the model is tuned.
    memory
        The local memory on top of it.
    """

    fine_tuning: FineTuningSettings = field(default_factory=FineTuningSettings)
    memory: KnnSettings = field(default_factory=KnnSettings)


def with_fine_tuned_memory(
    task: Task, method: Method, settings: FineTunedMemorySettings
) -> Method:
    """Return ``method`` with a memory on each client's fine-tuned model."""
    tuned = fine_tuned(task, method, settings.fine_tuning)
    return with_memory(task, tuned, settings.memory)


ON_TOP = PersonalizerSpec(
    title="FT + kNN",
    summary="The served model, fine-tuned, and the client's memory on top of it.",
    source="fedbasis-pflbed.txt, section 6",
    settings_type=FineTunedMemorySettings,
    apply=with_fine_tuned_memory,
    unseen="fine-tunes and remembers like any other client",
    needs_one_model=True,
)
