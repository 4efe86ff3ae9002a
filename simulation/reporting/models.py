"""Which models of a table are the same one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulation.reporting.runs import GROUPS
from simulation.reporting.setups import Setup

_TELLING = ("accuracy_weighted", "accuracy_bottom_decile", "num_clients")


@dataclass(frozen=True)
class Model:
    """By what a model is known: setups may share one, whatever they add to it.

    Attributes
    ----------
    title
        What tables call it.
    states
        Fingerprints of the server's last states, one a seed; None is not known.
    figures
        What it did on each group of clients, by seed. They tell models apart whose
        states are not known, and the same one that was tested on other data.
    """

    title: str
    states: tuple[str | None, ...]
    figures: tuple[tuple[object, ...], ...]


def own_model(setup: Setup) -> Model:
    """Return what the clients of a setup have at its end."""
    by_group = {group: [run.results[group] for run in setup.runs] for group in GROUPS}
    return _model(setup, setup.title, by_group)


def reference_model(setup: Setup, title: str) -> Model:
    """Return the unpersonalised model of a setup, called ``title``."""
    by_group = {
        group: [run.results[group]["global"] for run in setup.runs] for group in GROUPS
    }
    return _model(setup, title, by_group)


def _model(
    setup: Setup, title: str, by_group: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Model:
    return Model(
        title,
        states=tuple(run.results["training"].get("state_sha256") for run in setup.runs),
        figures=tuple(
            tuple(one.get(name) for name in _TELLING)
            for by_seed in by_group.values()
            for one in by_seed
        ),
    )
