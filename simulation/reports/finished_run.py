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
from knnper.experiment import dotted, load_experiment, metric_name, to_document
from knnper.metrics import ACCURACY
from knnper.server.results import result_problem, summarise
from knnper.server.run_folder import EXPERIMENT, RESULTS, RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.catalogue import METHODS, title_of
from knnper.strategies.core.method import AS_IT_IS
from knnper.strategies.core.task import ClientResult

GROUPS = ("seen", "unseen")
EVERYBODY = "all"
VALIDATION = "validation"  # `FinishedRun.evaluated_on` of runs that compare settings
UNKNOWN = "not known"
_LEFT_OUT = ("name", "run")

# One of them is there, or grows, as soon as a run, a round or a part is done.
RESULT_FILES = ("results.json", "rounds.jsonl", "failed.txt", "parts.jsonl")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run."""

    path: Path
    results: Mapping[str, Any]
    label: str = ""  # name in tables and charts, in place of the method's

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
    def split_hash(self) -> str:
        """The fingerprint of who has which examples."""
        return str(self.manifest.get("partition_hash", UNKNOWN))

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
        try:  # settings that came after it have their defaults
            experiment = load_experiment(self.experiment, experiment_catalogue())
            whole: Mapping[str, Any] = to_document(experiment)
        except ConfigError:
            whole = self.experiment
        relevant = {key: one for key, one in whole.items() if key not in _LEFT_OUT}
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
        """Equal for two runs that differ in the seed alone."""
        return json.dumps(self.settings, sort_keys=True)

    @property
    def title(self) -> str:
        """What tables call the method with what is put on top of it."""
        name = str(self.results["method"])
        if "title" in self.results:
            return str(self.results["title"])
        # Before there was a choice, every method had its own.
        default = METHODS[name].personalization if name in METHODS else AS_IT_IS
        return title_of(name, str(self.results.get("personalization", default)))

    @property
    def reference_title(self) -> str | None:
        """What tables call its unpersonalised model; None if that means nothing."""
        name = str(self.results["method"])
        if name in METHODS:
            return METHODS[name].reference_title
        title = str(self.results.get("title", name))
        if self.results.get("personalization", AS_IT_IS) != AS_IT_IS:
            # A user's method, with the title of what is on top behind its own.
            title = title.rpartition(" + ")[0] or title
        return f"{title} (global)"

    @property
    def evaluated_on(self) -> str:
        """Which of their splits the clients were tested on, ``test`` as a rule."""
        return str(self.settings.get("partition.evaluate_on", "test"))

    def figures(self, group: str) -> Mapping[str, Any]:
        """Return the figures of a group of clients as every table has them."""
        figures: Mapping[str, Any] = (
            self._of_everybody if group == EVERYBODY else self.results[group]
        )
        # Against a model that means nothing, as an untrained one, it is no figure.
        if self.reference_title is None:
            return {**figures, "fraction_degraded": None}
        return figures

    @functools.cached_property
    def _of_everybody(self) -> Mapping[str, Any]:
        return summarise(self.client_results(), self.metrics).as_document()

    def client_results(self) -> Iterator[ClientResult]:
        """Yield the clients' reports, but for those that were withheld.

        None where the results lack the fingerprint of the model.
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
        """What its clients were measured by; the accuracy always."""
        named = self.experiment.get("run", {}).get("metrics", ())
        names = (metric_name(one["name"]) for one in named)
        return tuple(dict.fromkeys((ACCURACY, *names)))

    @property
    def average(self) -> float:
        """Weighted accuracy over the seen clients, 0 where there is none."""
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
    """Return the runs in ``paths``: each a run's folder, or one that holds runs.

    The second value is what to tell of runs that are left out. ``labels`` are those of
    the paths, in the same order, or none.
    """
    runs, remarks = list[FinishedRun](), list[str]()
    for path, label in zip(paths, labels or [""] * len(paths), strict=True):
        inside = [] if (path / EXPERIMENT).is_file() else _runs_in(path)
        if not inside:
            runs.append(replace(load_run(path), label=label))
            continue
        done = [load_run(one) for one in inside if RunFolder(one).is_finished()]
        if not done:
            raise RunError(f"none of the {len(inside)} runs in {path} is done")
        tested = [run for run in done if run.evaluated_on != VALIDATION] or done
        for what, count in (
            ("without results", len(inside) - len(done)),
            ("that chose settings on validation data", len(done) - len(tested)),
        ):
            if count:
                remarks.append(f"Runs in {path} {what}, left out: {count}.")
        runs.extend(replace(run, label=label) for run in _best_first(tested))
    by_place = {run.path.resolve(): run for run in reversed(runs)}
    once = [run for run in runs if by_place[run.path.resolve()] is run]
    return once, list(dict.fromkeys(remarks))


def _best_first(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    averages: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        averages[run.kind].append(run.average)
    return sorted(runs, key=lambda run: -statistics.fmean(averages[run.kind]))


def _runs_in(path: Path) -> list[Path]:
    """Return the folders of runs in ``path/runs``, or else in ``path``."""
    place = path / "runs" if (path / "runs").is_dir() else path
    inside = sorted(place.iterdir()) if place.is_dir() else []
    return [one for one in inside if (one / EXPERIMENT).is_file()]
