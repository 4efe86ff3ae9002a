"""Figures of the containers against those of the simulation."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trial.engine import TrialError


@dataclass(frozen=True)
class Figures:
    """How a client does on its test split.

    Attributes
    ----------
    accuracy, log_loss
        Of what is served.
    accuracy_global
        Of the global model.
    knn_weight, num_stored
        What is served.
    """

    accuracy: float
    log_loss: float
    accuracy_global: float
    knn_weight: float
    num_stored: float

    @staticmethod
    def of(
        answers: Sequence[Mapping[str, Any]],
        labels: Sequence[int],
        info: Mapping[str, Any],
    ) -> "Figures":
        """Return what a service's n answers for inputs with n labels come to."""
        by_model = [list(one["global_probabilities"].values()) for one in answers]
        pairs = list(zip(answers, labels, strict=True))
        losses = [-math.log(one["probabilities"][str(label)]) for one, label in pairs]
        return Figures(
            accuracy=np.mean([one["label"] == label for one, label in pairs]).item(),
            log_loss=math.fsum(losses) / len(labels),
            accuracy_global=np.mean(np.argmax(by_model, 1) == labels).item(),
            knn_weight=info["knn_weight"],
            num_stored=info["store"]["num_stored"],
        )


def require_figures(name: str, found: Figures, row: Mapping[str, str]) -> None:
    """Compare what a service does with a client's row of the simulation.

    Raises
    ------
    TrialError
        If a figure differs: to the last bit, the loss to a millionth.
    """
    for key, value in vars(found).items():
        expected = float(row[key])
        # The service answers probabilities in decimals of 32-bit numbers.
        tolerance = 1e-6 * abs(expected) if key == "log_loss" else 0.0
        if abs(value - expected) > tolerance:
            raise TrialError(
                f"the service of {name}: {key} is {value!r}, the simulation's "
                f"{expected!r}"
            )


def require_rows(run: Path, reference: Path, names: Sequence[str]) -> None:
    """Compare a run's weights and its clients' rows with the simulation's.

    Raises
    ------
    TrialError
        If a letter differs.
    """
    found, expected = _weights(run), _weights(reference)
    if found != expected:
        raise TrialError(f"the weights are {found}, the simulation's {expected}")
    rows, all_rows = _rows(run), _rows(reference)
    wanted = {name: all_rows[name] for name in ("client", *names)}
    if rows != wanted:
        shown = "\n".join([*rows.values(), "the simulation's:", *wanted.values()])
        raise TrialError(f"clients.csv of {run.name} differs:\n{shown}")


def _weights(run: Path) -> str:
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    return str(results["training"]["state_sha256"])


def _rows(run: Path) -> dict[str, str]:
    lines = (run / "clients.csv").read_text(encoding="utf-8").splitlines()
    return {line.partition(",")[0]: line for line in lines}
