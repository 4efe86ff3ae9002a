"""Folders of runs that were never made: random clients, written as the server does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from knnper.metrics import computations
from knnper.server.results import summarise_groups, training_summary
from knnper.server.run_folder import EXPERIMENT, FIRST_LINE, RunFolder
from knnper.settings import Choice, Settings
from knnper.strategies.core.evaluation import ClientResult, score

STATE = "5" * 64


def client_result(
    number: int,
    seed: int = 0,
    *,
    num_test: int | None = None,
    own: bool = True,
    metrics: Sequence[str] = (),
) -> ClientResult:
    """Return what a client reports of random probabilities over three classes."""
    random = np.random.default_rng((seed, number))
    size = int(random.integers(0, 9)) if num_test is None else num_test

    def evaluation(size: int) -> Any:
        chances = torch.from_numpy(random.dirichlet([0.7] * 3, size=size))
        labels = torch.from_numpy(random.integers(0, 3, size=size))
        named = computations(Choice(name, Settings()) for name in metrics)
        return score(chances.reshape(size, 3), labels, metrics=named)

    personal = evaluation(size)
    chosen = {
        "knn_weight": float(random.choice([0.0, 0.3, 1.0])),
        "num_stored": float(random.integers(1, 40)),
    }
    return ClientResult(
        client=f"{number:04d}",
        seen=number % 4 > 0,
        num_train=int(random.integers(1, 30)),
        num_validation=2,
        personal=personal,
        reference=evaluation(size) if own else personal,
        validation=evaluation(2),
        chosen=chosen if own else {},
    )


def made_run(
    path: Path,
    results: Sequence[ClientResult] | None = None,
    *,
    seed: int = 0,
    method: str = "knn_per",
    losses: Sequence[float] = (2.0, 1.5),
    evaluate_on: str = "test",
    metrics: Sequence[str] = (),
    **settings: Any,
) -> Path:
    """Write the folder of a finished run, but for ``partition.json``; return it."""
    on_top = "knn" if method == "knn_per" else "none"
    clients = [client_result(number, seed, metrics=metrics) for number in range(12)]
    results = clients if results is None else results
    path.mkdir(parents=True)
    (path / EXPERIMENT).write_text(FIRST_LINE)
    folder = RunFolder(path)
    for number, loss in enumerate(losses, start=1):
        folder.append_round(
            {"server_round": number, "train_loss": loss, "seconds": 2.0}
            | {"num_clients": 2, "num_failed": 0, "bytes_down": 8, "bytes_up": 8}
        )
    folder.distributed.append(STATE, {result.client: result for result in results})
    folder.write_clients_csv(results, metrics)
    experiment = {
        "name": "made",
        "partition": {"name": "iid", "evaluate_on": evaluate_on},
        "training": settings,
        "method": {"name": method},
        "personalization": {"name": on_top},
        "run": {"seed": seed, "metrics": [{"name": metric} for metric in metrics]},
    }
    training = training_summary(folder.rounds(), results)
    folder.write_results(
        {
            "method": method,
            "personalization": on_top,
            **summarise_groups(results, metrics),
            "training": {**training, "personalization_seconds": 1.0}
            | {"state_sha256": STATE},
            "manifest": {
                "partition_hash": f"split of seed {seed}",
                "command": ["knnper", "simulate", "a b.yaml"],
                "started": "2025-01-01T00:00:00+00:00",
                "versions": {"torch": "2.7.0"},
                "experiment": experiment,
            },
        }
    )
    return path
