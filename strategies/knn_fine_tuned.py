"""kNN-Per + FT: a local memory on the representation of a fine-tuned model.

Chen et al. 2023, section 6, row KNN-PER+FT. The paper does not define the order. Here
the client fine-tunes first, and stores embeddings of the tuned model. It chooses λ with
the model that was tuned on the training split alone, which has not seen the validation
split.
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
    """Fine-tuning, and a memory on top of it.

    Attributes
    ----------
    fine_tuning
        The fine-tuning of the served model.
    memory
        The local memory on the tuned model.
    """

    fine_tuning: FineTuningSettings = field(default_factory=FineTuningSettings)
    memory: KnnSettings = field(default_factory=KnnSettings)


class FineTunedMemory(Personalizer):
    """The served model, fine-tuned, with the client's memory on top of it."""

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
