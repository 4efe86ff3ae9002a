"""A run of the digits with a tiny model, made in this process in a second."""

from pathlib import Path

from knnper.experiment_file import load_experiment
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.workbench import open_workbench


def finished_run(
    parent: Path,
    method: str = "fedavg",
    seed: int = 3,
    unseen_fraction: float = 0.0,
    **model: object,
) -> Path:
    """Return the folder ``run`` in ``parent`` with a finished run."""
    document = {
        "name": "trained",
        "data": {"name": "digits"},
        "partition": {
            "name": "dirichlet",
            "num_clients": 6,
            "alpha": 0.3,
            "unseen_fraction": unseen_fraction,
        },
        "model": {"name": "tiny_cnn", "embedding_dim": 8, **model},
        "training": {"num_rounds": 2, "batch_size": 16},
        "method": {"name": method},
        "run": {"seed": seed, "engine": "serial"},
    }
    experiment = load_experiment(document, experiment_catalogue())
    folder = RunFolder.create(parent / "run", experiment)
    simulate(open_workbench(experiment), folder, Observer(), ["test"])
    return folder.path
