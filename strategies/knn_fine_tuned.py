"""kNN-Per + FT: a local memory on the representation of a fine-tuned model.

Chen et al. 2023, section 6, row KNN-PER+FT. The paper does not say in which order;
here the client fine-tunes first and remembers with the tuned model. λ is chosen with
the model that was tuned on the training split alone, to which the validation split is
new.
"""

from dataclasses import dataclass, field

from knnper.datastore.memory import KnnSettings
from knnper.settings import Settings
from knnper.strategies.core.method import Method, Personalizer
from knnper.strategies.core.task import Task
from knnper.strategies.fine_tuning import FineTuning, FineTuningSettings
from knnper.strategies.knn_per import KnnMemory


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


class FineTunedMemory(Personalizer):
    """The served model, fine-tuned, and the client's memory on top of it."""

    title = "FT + kNN"
    source = "Chen et al. 2023, section 6"
    unseen = "fine-tunes and remembers like any other client"
    needs_one_model = True

    settings: FineTunedMemorySettings

    def __init__(
        self, task: Task, method: Method, settings: FineTunedMemorySettings
    ) -> None:
        tuned = FineTuning(task, method, settings.fine_tuning)
        super().__init__(task, KnnMemory(task, tuned, settings.memory), settings)
