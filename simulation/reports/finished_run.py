"""A finished run: its results, its settings and its clients' reports."""

import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knnper.errors import ConfigError, RunError
from knnper.experiment_file import load_experiment, to_document
from knnper.metrics import ACCURACY
from knnper.server.plausibility import result_problem
from knnper.server.results import summarise
from knnper.server.run_folder import EXPERIMENT, RESULTS, RunFolder
from knnper.settings import dotted, metric_name
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.catalogue import METHODS, title_of
from knnper.strategies.core.evaluation import ClientResult
from knnper.strategies.core.method import AS_IT_IS

GROUPS = ("seen", "unseen")
EVERYBODY = "all"
VALIDATION = "validation"  # `FinishedRun.evaluated_on` of runs that compare settings
UNKNOWN = "not known"
# One of these files appears or grows whenever a run, a round or a part of one ends.
RESULT_FILES = ("results.json", "rounds.jsonl", "failed.txt", "parts.jsonl")
_CHANGES_NO_RESULT = ("name", "run")  # sections of an experiment


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    Attributes
    ----------
    results
        The content of ``results.json``.
    label
        Its name in tables and charts; empty for that of the method.
    """

    path: Path
    results: Mapping[str, Any]
    label: str = ""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.resolve().name

    @property
    def folder(self) -> RunFolder:
        """The folder with all its files."""
        return RunFolder(self.path)

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The experiment, versions and machine of the run."""
        manifest: Mapping[str, Any] = self.results["manifest"]
        return manifest

    @property
    def split_hash(self) -> str:
        """The fingerprint of the partition."""
        return str(self.manifest.get("partition_hash", UNKNOWN))

    @property
    def experiment(self) -> Mapping[str, Any]:
        """Every setting, as plain values; empty if the results hold none."""
        experiment: Mapping[str, Any] = self.manifest.get("experiment", {})
        return experiment

    @property
    def seed(self) -> int | None:
        """The seed; None if the results hold none."""
        seed: int | None = self.experiment.get("run", {}).get("seed")
        return seed

    @functools.cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings that results depend on, without the seed, by dotted key."""
        try:  # settings that the run did not have yet get their defaults
            experiment = load_experiment(self.experiment, experiment_catalogue())
            whole: Mapping[str, Any] = to_document(experiment)
        except ConfigError:
            whole = self.experiment
        relevant = {
            section: values
            for section, values in whole.items()
            if section not in _CHANGES_NO_RESULT
        }
        return dict(dotted(relevant)) or {"run": str(self.path)}

    def section(self, name: str) -> dict[str, Any]:
        """Return the settings of a section by their names in it."""
        return {
            key.removeprefix(f"{name}."): value
            for key, value in self.settings.items()
            if key.startswith(f"{name}.")
        }

    @functools.cached_property
    def kind(self) -> str:
        """A text that is equal for two runs that differ in the seed alone."""
        return json.dumps(self.settings, sort_keys=True)

    @property
    def title(self) -> str:
        """The title of the method with its personaliser."""
        name = str(self.results["method"])
        if "title" in self.results:
            return str(self.results["title"])
        default = METHODS[name].personalization if name in METHODS else AS_IT_IS
        return title_of(name, str(self.results.get("personalization", default)))

    @property
    def reference_title(self) -> str | None:
        """The title of its unpersonalised model; None if that model is untrained."""
        name = str(self.results["method"])
        if name in METHODS:
            return METHODS[name].reference_title
        title = str(self.results.get("title", name))
        if self.results.get("personalization", AS_IT_IS) != AS_IT_IS:
            # The title of a user's method, followed by that of its personaliser.
            title = title.rpartition(" + ")[0] or title
        return f"{title} (global)"

    @property
    def evaluated_on(self) -> str:
        """The split that clients were evaluated on: ``test`` or ``validation``."""
        return str(self.settings.get("partition.evaluate_on", "test"))

    def figures(self, group: str) -> Mapping[str, Any]:
        """Return the figures of a group of clients, see `Summary`."""
        figures: Mapping[str, Any] = (
            self._figures_of_all if group == EVERYBODY else self.results[group]
        )
        # A comparison with an untrained model means nothing.
        if self.reference_title is None:
            return {**figures, "fraction_degraded": None}
        return figures

    @functools.cached_property
    def _figures_of_all(self) -> Mapping[str, Any]:
        return summarise(self.client_results(), self.metrics).as_document()

    def client_results(self) -> Iterator[ClientResult]:
        """Yield the clients' reports, without those that clients withheld.

        None if the results lack the fingerprint of the model.
        """
        model = self.results["training"].get("state_sha256")
        if model is None:
            return
        reported = self.folder.distributed.reported(model)
        for result in reported.of(reported):
            if result is None:
                continue
            if problem := result_problem(result, None):
                raise RunError(
                    f"{reported.path} is damaged, client {result.client}: {problem}. "
                    "Bring back a copy of the file, or remove it"
                )
            yield result

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of its clients, the accuracy first."""
        configured = self.experiment.get("run", {}).get("metrics", ())
        names = (metric_name(metric["name"]) for metric in configured)
        return tuple(dict.fromkeys((ACCURACY, *names)))

    @property
    def average(self) -> float:
        """Weighted accuracy over the seen clients; 0 without any."""
        return float(self.results["seen"].get("accuracy_weighted") or 0.0)


def load_run(path: Path) -> FinishedRun:
    """Return the finished run in the folder ``path``."""
    results = RunFolder.open(path).results()
    if missing := {"method", "training", "manifest", *GROUPS} - results.keys():
        raise RunError(
            f"{path / RESULTS} is damaged: {', '.join(sorted(missing))} missing"
        )
    return FinishedRun(path, results)


def find_runs(
    paths: Sequence[Path], labels: Sequence[str] = ()
) -> tuple[list[FinishedRun], list[str]]:
    """Return the runs in ``paths``: each a run's folder, or a folder of runs.

    Parameters
    ----------
    labels
        A label for each path, in the same order, or none.

    Returns
    -------
    The runs, each once, and remarks on runs that are left out.
    """
    runs = list[FinishedRun]()
    remarks = list[str]()
    for path, label in zip(paths, labels or [""] * len(paths), strict=True):
        folders = [] if (path / EXPERIMENT).is_file() else _run_folders_in(path)
        if not folders:
            runs.append(replace(load_run(path), label=label))
            continue
        done = [load_run(run) for run in folders if RunFolder(run).is_finished()]
        if not done:
            raise RunError(f"none of the {len(folders)} runs in {path} is done")
        tested = [run for run in done if run.evaluated_on != VALIDATION] or done
        for reason, count in (
            ("without results", len(folders) - len(done)),
            ("that chose settings on validation data", len(done) - len(tested)),
        ):
            if count:
                remarks.append(f"Runs in {path} {reason}, left out: {count}.")
        runs.extend(replace(run, label=label) for run in _best_first(tested))
    by_place = {run.path.resolve(): run for run in reversed(runs)}
    unique = [run for run in runs if by_place[run.path.resolve()] is run]
    return unique, list(dict.fromkeys(remarks))


def _best_first(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    averages: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        averages[run.kind].append(run.average)
    return sorted(runs, key=lambda run: -statistics.fmean(averages[run.kind]))


def _run_folders_in(path: Path) -> list[Path]:
    """Return the folders of runs in ``path/runs``, or else in ``path``."""
    place = path / "runs" if (path / "runs").is_dir() else path
    folders = sorted(place.iterdir()) if place.is_dir() else []
    return [folder for folder in folders if (folder / EXPERIMENT).is_file()]
