"""Figures of the containers against those of the simulation."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trial.engine import TrialError

CLOSE = 1e-5
"""Ten times what other threads make of a probability."""


@dataclass(frozen=True)
class Figures:
    """How a client does on its test split."""

    accuracy: float
    log_loss: float
    accuracy_global: float
    knn_weight: float
    num_stored: float
    undecided: float

    @staticmethod
    def of(
        answers: Sequence[Mapping[str, Any]],
        labels: Sequence[int],
        info: Mapping[str, Any],
    ) -> "Figures":
        """Return what a service's n answers for inputs with n labels come to."""
        by_model = _probabilities(answers, "global_probabilities")
        served = _probabilities(answers, "probabilities")
        pairs = list(zip(answers, labels, strict=True))
        losses = [-math.log(one["probabilities"][str(label)]) for one, label in pairs]
        return Figures(
            accuracy=np.mean([one["label"] == label for one, label in pairs]).item(),
            log_loss=math.fsum(losses) / len(labels),
            accuracy_global=np.mean(np.argmax(by_model, 1) == labels).item(),
            knn_weight=info["knn_weight"],
            num_stored=info["store"]["num_stored"],
            undecided=np.mean(_are_close(by_model) | _are_close(served)).item(),
        )


def require_figures(name: str, found: Figures, row: Mapping[str, str]) -> None:
    """Compare what a service does with a client's row of the simulation."""
    tolerances = {
        "accuracy": found.undecided,
        "accuracy_global": found.undecided,
        "log_loss": CLOSE * float(row["log_loss"]),
        "knn_weight": 0.0,
        "num_stored": 0.0,
    }
    for key, tolerance in tolerances.items():
        value, expected = getattr(found, key), float(row[key])
        if abs(value - expected) > tolerance:
            raise TrialError(
                f"the service of {name}: {key} is {value!r}, the simulation's "
                f"{expected!r}"
            )


def _probabilities(
    answers: Sequence[Mapping[str, Any]], name: str
) -> NDArray[np.float64]:
    return np.array([list(one[name].values()) for one in answers])


def _are_close(probabilities: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether the two largest of a row, shape (n, c), can change places."""
    ordered = np.sort(probabilities, axis=1)
    close: NDArray[np.bool_] = ordered[:, -1] - ordered[:, -2] < CLOSE
    return close


def require_rows(run: Path, reference: Path, names: Sequence[str]) -> None:
    """Compare a run's weights and its clients' rows with the simulation's."""
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
