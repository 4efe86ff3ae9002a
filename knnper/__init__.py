"""A distributed personalised federated learning system on Flower.

What stands in ``__all__`` is the public Python interface, see ``docs/python.md``. Each
name is imported when it is asked for: ``import knnper`` loads neither torch nor Flower.

The rooms `server`, `client`, `strategies`, `datastore` and `simulation` are folders at
the top of the repository; links beside this file make them `knnper.server` and so on.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from knnper.lazy import lazy_names, modules_by_name

__version__ = "0.1.0"

# Flower and Ray are told to send and look up nothing. Flower reads that when it is
# imported, so it stands before whatever of this package imports it.
os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    # Workers that reserve no GPU: what a later Ray does anyway, without its warning.
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
)
# With Ray's default of 15, anything else on the machine takes the workers' time, and a
# simulation is many times slower beside it. Who wants that starts it with `nice`.
os.environ.setdefault("RAY_worker_niceness", "0")

# Flower's app bundle leaves links out: there the rooms are found beside this folder.
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
    from knnper.experiment import (
        Experiment,
        NonNegativeFloat,
        NonNegativeInt,
        PositiveFloat,
        PositiveFraction,
        PositiveInt,
        ProperFraction,
        Settings,
        UnitInterval,
    )
    from knnper.seeding import RandomKey
    from knnper.simulation.interface import Run, simulate
    from knnper.simulation.partition.schemes import Assignment
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
        "knnper.experiment": "Experiment NonNegativeFloat NonNegativeInt "
        "PositiveFloat PositiveFraction PositiveInt ProperFraction Settings "
        "UnitInterval",
        "knnper.embedding_model": "EmbeddingModel",
        "knnper.seeding": "RandomKey",
        "knnper.simulation.interface": "Run simulate",
        "knnper.simulation.partition.schemes": "Assignment",
        "knnper.strategies.core.method": "Method Personalizer",
        "knnper.strategies.fedavg": "FedAvg",
    }
    _MODULES = modules_by_name(_NAMES)
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
