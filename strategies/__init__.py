"""The methods, one file each, and the public classes from which users build their own.

``__all__`` is the public interface; see ``docs/adding_a_method.md``. Each name is
imported on first use.
"""

from typing import TYPE_CHECKING

from knnper.lazy import lazy_names, modules_by_name

__all__ = [
    "Compressor",
    "FedAvg",
    "HeadPredictor",
    "LocalModel",
    "LocalResult",
    "Method",
    "MixturePredictor",
    "ModelPayload",
    "ModelPredictor",
    "ModelState",
    "ModelUpdate",
    "NoSettings",
    "NoState",
    "PartlyShared",
    "Personalizer",
    "Predictor",
    "Record",
    "RunningMean",
    "Task",
    "Updates",
    "evaluate",
    "local_sgd",
    "mean_in_parts",
    "num_steps",
    "on_both_splits",
    "pull",
    "trained_on_both_splits",
]

if TYPE_CHECKING:
    from knnper.strategies.core.averaging import RunningMean, Updates, mean_in_parts
    from knnper.strategies.core.compression import Compressor
    from knnper.strategies.core.evaluation import evaluate
    from knnper.strategies.core.final_training import (
        on_both_splits,
        trained_on_both_splits,
    )
    from knnper.strategies.core.method import Method, NoSettings, Personalizer
    from knnper.strategies.core.predictors import (
        HeadPredictor,
        MixturePredictor,
        ModelPredictor,
        Predictor,
    )
    from knnper.strategies.core.proximal import pull
    from knnper.strategies.core.records import (
        ModelPayload,
        ModelState,
        ModelUpdate,
        NoState,
        Record,
    )
    from knnper.strategies.core.sharing import PartlyShared
    from knnper.strategies.core.task import Task
    from knnper.strategies.core.training import (
        LocalModel,
        LocalResult,
        local_sgd,
        num_steps,
    )
    from knnper.strategies.fedavg import FedAvg
else:
    _MODULES = modules_by_name(
        {
            "knnper.strategies.core.averaging": "RunningMean Updates mean_in_parts",
            "knnper.strategies.core.compression": "Compressor",
            "knnper.strategies.core.method": "Method NoSettings Personalizer",
            "knnper.strategies.core.records": "ModelPayload ModelState ModelUpdate "
            "NoState Record",
            "knnper.strategies.core.evaluation": "evaluate",
            "knnper.strategies.core.final_training": "on_both_splits "
            "trained_on_both_splits",
            "knnper.strategies.core.predictors": "HeadPredictor MixturePredictor "
            "ModelPredictor Predictor",
            "knnper.strategies.core.proximal": "pull",
            "knnper.strategies.core.sharing": "PartlyShared",
            "knnper.strategies.core.task": "Task",
            "knnper.strategies.core.training": "LocalModel LocalResult local_sgd "
            "num_steps",
            "knnper.strategies.fedavg": "FedAvg",
        }
    )
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
