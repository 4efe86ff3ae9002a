"""The finished runs that a report is about."""

import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnper.config.document import dotted, to_document
from knnper.config.errors import ConfigError, RunError
from knnper.config.loading import load_experiment
from server.results import summarise
from server.run_folder import RESULTS, RunFolder
from server.run_marks import EXPERIMENT
from simulation.catalogue import experiment_catalogue
from strategies.catalogue import METHODS
from strategies.core.method import AS_IT_IS
from strategies.experiments import title_of

GROUPS = ("seen", "unseen")
EVERYBODY = "all"
VALIDATION = "validation"
"""What `Run.evaluated_on` says of runs that compare settings."""

_LEFT_OUT = ("name", "run")


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    path
        Its folder.
    results
        The content of ``results.json``.
    """

    path: Path
    results: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.resolve().name

    @property
    def folder(self) -> RunFolder:
        """All that it wrote."""
        return RunFolder(self.path)

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Under what conditions it was made."""
        manifest: Mapping[str, Any] = self.results["manifest"]
        return manifest

    @property
    def experiment(self) -> Mapping[str, Any]:
        """Every setting, as plain values; nothing where the results do not say."""
        experiment: Mapping[str, Any] = self.manifest.get("experiment", {})
        return experiment

    @property
    def seed(self) -> int | None:
        """The seed of the run; None where the results do not say."""
        seed: int | None = self.experiment.get("run", {}).get("seed")
        return seed

    @functools.cached_property
    def settings(self) -> Mapping[str, Any]:
        """What results depend on but for the seed, by dotted key."""
        relevant = {
            name: value
            for name, value in _completed(self.experiment).items()
            if name not in _LEFT_OUT
        }
        return dict(dotted(relevant)) or {"run": str(self.path)}

    @functools.cached_property
    def kind(self) -> str:
        """Equal for two runs that differ in the seed alone."""
        return json.dumps(self.settings, sort_keys=True)

    @property
    def title(self) -> str:
        """What tables call the method with what is put on top of it."""
        name = str(self.results["method"])
        # Before there was a choice, every method had its own.
        default = METHODS[name].personalization if name in METHODS else AS_IT_IS
        return title_of(name, str(self.results.get("personalization", default)))

    @property
    def reference_title(self) -> str | None:
        """What tables call its unpersonalised model; None if that means nothing."""
        name = str(self.results["method"])
        return METHODS[name].reference_title if name in METHODS else f"{name} (global)"

    @property
    def evaluated_on(self) -> str:
        """Which of their splits the clients were tested on, ``test`` as a rule."""
        return str(self.settings.get("partition.evaluate_on", "test"))

    def figures(self, group: str) -> Mapping[str, Any]:
        """Return the figures of a group of clients as every table has them.

        The fraction degraded against an unpersonalised model that means nothing, such
        as an untrained one, would be a number without a meaning: it has no value.

        Parameters
        ----------
        group
            One of `GROUPS`, or `EVERYBODY`.
        """
        figures: Mapping[str, Any] = (
            self._of_everybody if group == EVERYBODY else self.results[group]
        )
        if self.reference_title is None:
            return {**figures, "fraction_degraded": None}
        return figures

    @functools.cached_property
    def _of_everybody(self) -> Mapping[str, Any]:
        model = self.results["training"]["state_sha256"]
        handed = self.folder.hand_overs.reported(model).values()
        everybody = summarise([result for result in handed if result is not None])
        return everybody.as_document()

    @property
    def average(self) -> float:
        """Weighted accuracy over the seen clients, 0 where there is none."""
        return float(self.results["seen"].get("accuracy_weighted") or 0.0)


@dataclass(frozen=True)
class Found:
    """What was found in the folders that were named.

    Attributes
    ----------
    runs
        In the order of the folders; those of a comparison with the best kind first.
    remarks
        Sentences on runs that are left out.
    """

    runs: tuple[Run, ...]
    remarks: tuple[str, ...]


def load_run(path: Path) -> Run:
    """Return the finished run in the folder ``path``.

    Raises
    ------
    RunError
        If there is no run, it is not done, or its results are damaged.
    """
    results = RunFolder.open(path).results()
    missing = {"method", "training", "manifest", *GROUPS} - results.keys()
    if missing:
        raise RunError(
            f"{path / RESULTS} is damaged: {', '.join(sorted(missing))} missing"
        )
    return Run(path, results)


def find_runs(paths: Sequence[Path]) -> Found:
    """Return the runs in ``paths``: each a run's folder, or one that holds runs.

    Of a folder that holds runs, such as that of a comparison, those that are not done
    are left out, and those that were evaluated on validation data, unless all were. A
    run that is named again, by itself or with its folder, counts once.

    Raises
    ------
    RunError
        As `load_run`; and if a folder holds no run that is done.
    """
    runs, remarks = list[Run](), list[str]()
    for path in paths:
        inside = [] if (path / EXPERIMENT).is_file() else list(_runs_in(path))
        if not inside:
            runs.append(load_run(path))
            continue
        done = [load_run(one) for one in inside if RunFolder(one).is_finished()]
        if not done:
            raise RunError(f"none of the {len(inside)} runs in {path} is done")
        tested = [run for run in done if run.evaluated_on != VALIDATION] or done
        remarks.extend(_remarks(path, len(inside) - len(done), len(done) - len(tested)))
        runs.extend(_best_first(tested))
    by_place = {run.path.resolve(): run for run in reversed(runs)}
    once = [run for run in runs if by_place[run.path.resolve()] is run]
    return Found(tuple(once), tuple(dict.fromkeys(remarks)))


def _runs_in(path: Path) -> Iterator[Path]:
    """Yield the folders of runs in ``path/runs``, or else in ``path``."""
    place = path / "runs" if (path / "runs").is_dir() else path
    if place.is_dir():
        yield from sorted(
            one for one in place.iterdir() if (one / EXPERIMENT).is_file()
        )


def _remarks(path: Path, num_unfinished: int, num_tuning: int) -> Iterator[str]:
    if num_unfinished:
        yield f"Runs in {path} without results, left out: {num_unfinished}."
    if num_tuning:
        yield (
            f"Runs in {path} that chose settings on validation data, left out: "
            f"{num_tuning}."
        )


def _best_first(runs: Sequence[Run]) -> list[Run]:
    averages: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        averages[run.kind].append(run.average)
    return sorted(runs, key=lambda run: -statistics.fmean(averages[run.kind]))


def _completed(experiment: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an experiment with the settings that came after it, at their defaults.

    One that this version does not know stays as it is.
    """
    try:
        return to_document(load_experiment(experiment, experiment_catalogue()))
    except ConfigError:
        return experiment
