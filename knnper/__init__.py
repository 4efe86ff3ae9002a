"""A distributed personalised federated learning system on Flower.

What stands in ``__all__`` is the public Python interface, see ``docs/python.md``. Each
name is imported when it is asked for: ``import knnper`` loads neither torch nor Flower.

The rooms `server`, `client`, `strategies`, `datastore` and `simulation` are folders at
the top of the repository; links beside this file make them `knnper.server` and so on.
"""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    "OwnCodeError",
    "Personalizer",
    "RandomKey",
    "Run",
    "RunError",
    "Settings",
    "StoreError",
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
    from knnper.embedding_model import EmbeddingModel
    from knnper.errors import (
        ConfigError,
        DataError,
        KnnPerError,
        OwnCodeError,
        RunError,
    )
    from knnper.experiment import Experiment, Settings
    from knnper.seeding import RandomKey
    from knnper.simulation.interface import Run, simulate
    from knnper.strategies.core.method import Method, Personalizer
    from knnper.strategies.fedavg import FedAvg
else:
    _NAMES = {
        "knnper.data.examples": "ClientData DataFormat Dataset Examples InputSpec "
        "LabelledArrays",
        "knnper.datastore.examples": "StoreError",
        "knnper.datastore.local_memory": "LocalMemory NeighborTable",
        "knnper.errors": "ConfigError DataError KnnPerError OwnCodeError RunError",
        "knnper.experiment": "Experiment Settings",
        "knnper.embedding_model": "EmbeddingModel",
        "knnper.seeding": "RandomKey",
        "knnper.simulation.interface": "Run simulate",
        "knnper.strategies.core.method": "Method Personalizer",
        "knnper.strategies.fedavg": "FedAvg",
    }
    _MODULES = {name: one for one, names in _NAMES.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
