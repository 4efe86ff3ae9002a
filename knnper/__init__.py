"""A distributed personalised federated learning system on Flower.

``__all__`` lists the public Python interface, which ``docs/python.md`` describes. Names
are imported at their first use, so ``import knnper`` loads neither torch nor Flower.

The packages `server`, `client`, `strategies`, `datastore` and `simulation` are folders
at the top of the repository. Links beside this file make them `knnper.server`, ...
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from knnper.lazy import lazy_names, modules_by_name

__version__ = "0.1.0"

# Defaults for Flower and Ray. Both read them when they are imported, so this code runs
# before any module of this package imports either. Values that the user has set stay.
_ENVIRONMENT_DEFAULTS = {
    # Flower sends no usage statistics and looks for no newer version.
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # In workers without a GPU, Ray leaves CUDA_VISIBLE_DEVICES alone. Later versions of
    # Ray do so by default; this one warns about the change.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray gives its workers niceness 15, so that any other process takes their CPU time
    # and slows a simulation down severalfold. Start knnper with `nice` to lower it.
    "RAY_worker_niceness": "0",
}
for _name, _default in _ENVIRONMENT_DEFAULTS.items():
    os.environ.setdefault(_name, _default)

# Flower's app bundle drops links: there the five packages lie beside this folder.
if not (Path(__file__).parent / "server").exists():
    __path__.append(str(Path(__file__).parents[1]))

__all__ = [
    "Assignment",
    "ClientData",
    "ConfigError",
    "DataError",
    "DataFormat",
    "Dataset",
    "EmbeddingModel",
    "Examples",
    "Experiment",
    "FedAvg",
    "InputSpec",
    "KnnPerError",
    "LabelledArrays",
    "LocalMemory",
    "Method",
    "NeighborTable",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OwnCodeError",
    "Personalizer",
    "Policy",
    "PositiveFloat",
    "PositiveFraction",
    "PositiveInt",
    "Problem",
    "ProperFraction",
    "RandomKey",
    "Run",
    "RunError",
    "Settings",
    "StoreError",
    "UnitInterval",
    "simulate",
]

if TYPE_CHECKING:
    from knnper.data.examples import (
        ClientData,
        DataFormat,
        Dataset,
        Examples,
        InputSpec,
        LabelledArrays,
    )
    from knnper.datastore.examples import StoreError
    from knnper.datastore.local_memory import LocalMemory, NeighborTable
    from knnper.datastore.policy import Policy
    from knnper.embedding_model import EmbeddingModel
    from knnper.errors import (
        ConfigError,
        DataError,
        KnnPerError,
        OwnCodeError,
        Problem,
        RunError,
    )
    from knnper.experiment import Experiment
    from knnper.seeding import RandomKey
    from knnper.settings import (
        NonNegativeFloat,
        NonNegativeInt,
        PositiveFloat,
        PositiveFraction,
        PositiveInt,
        ProperFraction,
        Settings,
        UnitInterval,
    )
    from knnper.simulation.interface import Run, simulate
    from knnper.simulation.partition.allocation import Assignment
    from knnper.strategies.core.method import Method, Personalizer
    from knnper.strategies.fedavg import FedAvg
else:
    _NAMES = {
        "knnper.data.examples": "ClientData DataFormat Dataset Examples InputSpec "
        "LabelledArrays",
        "knnper.datastore.examples": "StoreError",
        "knnper.datastore.local_memory": "LocalMemory NeighborTable",
        "knnper.datastore.policy": "Policy",
        "knnper.errors": "ConfigError DataError KnnPerError OwnCodeError Problem "
        "RunError",
        "knnper.experiment": "Experiment",
        "knnper.embedding_model": "EmbeddingModel",
        "knnper.seeding": "RandomKey",
        "knnper.settings": "NonNegativeFloat NonNegativeInt PositiveFloat "
        "PositiveFraction PositiveInt ProperFraction Settings UnitInterval",
        "knnper.simulation.interface": "Run simulate",
        "knnper.simulation.partition.allocation": "Assignment",
        "knnper.strategies.core.method": "Method Personalizer",
        "knnper.strategies.fedavg": "FedAvg",
    }
    _MODULES = modules_by_name(_NAMES)
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
