"""Finished runs: which there are, what sets them apart, and the table of them."""

import csv
import dataclasses
import functools
import hashlib
import heapq
import inspect
import io
import json
import math
import operator
import shlex
import statistics
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python
from scipy.special import stdtrit

from knnper.data.catalogue import DATA_SETS
from knnper.errors import ConfigError, RunError
from knnper.experiment import (
    dotted,
    dump_yaml,
    load_experiment,
    metric_name,
    to_document,
)
from knnper.metrics import ACCURACY, called, gain
from knnper.models import MODELS
from knnper.server.result_files import Count, Number
from knnper.server.results import (
    columns_of,
    figure_of,
    fraction_degraded,
    result_problem,
    summarise,
)
from knnper.server.run_folder import EXPERIMENT, RESULTS, RunFolder
from knnper.simulation.batches.folder import CODE, fingerprint_in, read_inputs
from knnper.simulation.batches.plan import TERMS
from knnper.simulation.partition.schemes import PARTITIONS
from knnper.simulation.workbench import ClientCounts, experiment_catalogue
from knnper.strategies.catalogue import METHODS, title_of
from knnper.strategies.core.method import AS_IT_IS
from knnper.strategies.core.task import ClientResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Names from outside stay one line, one cell, and no formula.

_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")  # of Unicode: controls, half characters, line ends
_NOT_IN_XML = "\ufffe\uffff"


def one_line(text: str) -> str:
    """Return a text with a space for each character that is none, or ends a line."""
    return "".join(
        " " if unicodedata.category(one) in _NO_TEXT or one in _NOT_IN_XML else one
        for one in text
    )


def chart_text(text: str) -> str:
    """Return a text as one line that matplotlib draws literally, formulas too."""
    return one_line(text).replace("$", r"\$")


def markdown_text(text: str) -> str:
    """Return a text as a part of a line of Markdown, in which it is no HTML."""
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;")


def markdown_cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return markdown_text(text).replace("|", r"\|")


def percent(fraction: float) -> str:
    """Return a fraction of 1 in percent, with one digit."""
    return f"{100 * fraction:.1f} %"


_RULE = 3  # characters at least of the line below a header in Markdown


@dataclass(frozen=True)
class Table:
    """A table as text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of_cells(cls, title: str, cells: Sequence[Sequence[str]]) -> "Table":
        """Return a table of which the first row is the header."""
        header, *rows = map(tuple, cells)
        return cls(title, header, tuple(rows))

    def as_markdown(self) -> str:
        """Return header and rows as a Markdown table, all but names to the right."""
        lines = [list(map(markdown_cell, line)) for line in (self.header, *self.rows)]
        columns = zip(*lines, strict=True)
        first, *others = (max(_RULE, *map(len, cells)) for cells in columns)
        lines.insert(1, ["-" * first, *("-" * (one - 1) + ":" for one in others)])
        padded = (
            [name.ljust(first), *map(str.rjust, numbers, others)]
            for name, *numbers in lines
        )
        return "".join(f"| {' | '.join(cells)} |\n" for cells in padded)


@dataclass(frozen=True)
class Chart:
    """A picture that is drawn when it is wanted."""

    name: str
    title: str
    draw: "Callable[[], Figure]"


@dataclass(frozen=True)
class Shown:
    """All that there is to show."""

    tables: tuple[Table, ...]
    charts: tuple[Chart, ...] = ()
    remarks: tuple[str, ...] = ()


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with the columns of the one that has most of them."""
    text, header = io.StringIO(), max(rows, key=len, default={})
    writer = csv.DictWriter(text, list(header), restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        as_json = {
            key: json.dumps(value)
            for key, value in row.items()
            if isinstance(value, list | dict | bool)
        }
        writer.writerow({**row, **as_json})
    return text.getvalue()


CONFIDENCE = 0.95
WEAK = "*"  # behind an interval of two runs, see `WEAK_NOTE`
WEAK_NOTE = (
    f"Intervals marked {WEAK} are of two seeds: half of one is 12.7 standard errors of "
    "the mean (of three seeds 4.3, of five 2.8). Add seeds before you compare."
)


@dataclass(frozen=True)
class Estimate:
    """The mean of a figure over some runs, and how sure it is."""

    mean: float | None
    std: float | None
    half_width: float | None
    count: int

    @property
    def mark(self) -> str:
        """`WEAK` where the interval is of two runs, else nothing."""
        return WEAK if self.count == 2 and self.half_width is not None else ""

    def flat(
        self, name: str, deviation: str = "_std", half: str = "_half_width"
    ) -> dict[str, float | None]:
        """Return mean, deviation and half width by their names in a file."""
        names = (name, f"{name}{deviation}", f"{name}{half}")
        return dict(zip(names, (self.mean, self.std, self.half_width), strict=True))

    def text(self, scale: float = 100.0, digits: int = 1) -> str:
        """Return it with its interval, of a fraction in percent: ``79.9 ± 1.2``."""
        if self.mean is None:
            return "-"
        ends = [self.mean, *([] if self.half_width is None else [self.half_width])]
        return " ± ".join(f"{scale * one:.{digits}f}" for one in ends) + self.mark

    def percent(self) -> str:
        """Return a fraction with the sign, as in ``79.9 ± 1.2 %``."""
        text = self.text().removesuffix(WEAK)
        return "-" if self.mean is None else f"{text} %{self.mark}"


def estimate(values: Iterable[float | None]) -> Estimate:
    """Return mean and interval of the values that are there."""
    # Half of it is t · s / √n: t the 97.5 % quantile of Student's distribution with
    # n - 1 degrees of freedom, s the sample's standard deviation.
    found = [value for value in values if value is not None]
    mean = statistics.fmean(found) if found else None
    if len(found) < 2:
        return Estimate(mean, None, None, len(found))
    std = statistics.stdev(found)
    quantile = float(stdtrit(len(found) - 1, (1 + CONFIDENCE) / 2))
    return Estimate(mean, std, quantile * std / math.sqrt(len(found)), len(found))


GROUPS = ("seen", "unseen")
EVERYBODY = "all"
VALIDATION = "validation"  # `Run.evaluated_on` of runs that compare settings
UNKNOWN = "not known"


@dataclass(frozen=True)
class Run:
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


_LEFT_OUT = ("name", "run")


def load_run(path: Path) -> Run:
    """Return the finished run in the folder ``path``."""
    results = RunFolder.open(path).results()
    if missing := {"method", "training", "manifest", *GROUPS} - results.keys():
        raise RunError(
            f"{path / RESULTS} is damaged: {', '.join(sorted(missing))} missing"
        )
    return Run(path, results)


def find_runs(
    paths: Sequence[Path], labels: Sequence[str] = ()
) -> tuple[list[Run], list[str]]:
    """Return the runs in ``paths``: each a run's folder, or one that holds runs.

    The second value is what to tell of runs that are left out. ``labels`` are those of
    the paths, in the same order, or none.
    """
    runs, remarks = list[Run](), list[str]()
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


def _best_first(runs: Sequence[Run]) -> list[Run]:
    averages: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        averages[run.kind].append(run.average)
    return sorted(runs, key=lambda run: -statistics.fmean(averages[run.kind]))


def _runs_in(path: Path) -> list[Path]:
    """Return the folders of runs in ``path/runs``, or else in ``path``."""
    place = path / "runs" if (path / "runs").is_dir() else path
    inside = sorted(place.iterdir()) if place.is_dir() else []
    return [one for one in inside if (one / EXPERIMENT).is_file()]


MOST_IN_LABEL = 3  # departures in a label; with more of them it has the run's name
ABSENT = "-"


@dataclass(frozen=True)
class Setup:
    """Runs that differ in the seed alone: one row of a table, one line of a chart."""

    title: str
    label: str  # its name in tables and charts, in no two setups the same
    runs: tuple[Run, ...]

    @property
    def has_reference(self) -> bool:
        """Whether its unpersonalised model means anything."""
        return self.runs[0].reference_title is not None


def setups_of(runs: Iterable[Run]) -> list[Setup]:
    """Return the setups of ``runs``, in the order of each one's first run."""
    # A second run with the same seed is no further evidence: it makes another setup.
    kinds: dict[tuple[str, str, int], list[Run]] = {}
    times: Counter[tuple[str, str, int | None]] = Counter()
    for run in runs:
        again = times[run.label, run.kind, run.seed]
        kinds.setdefault((run.label, run.kind, again), []).append(run)
        times[run.label, run.kind, run.seed] += 1
    for found in kinds.values():
        found.sort(key=lambda run: run.seed or 0)
    groups, labels = list(kinds.values()), dict[int, str]()
    names = [found[0].label or found[0].title for found in groups]
    for name in set(names):
        same = [place for place, other in enumerate(names) if other == name]
        told = _told_apart([groups[place][0] for place in same])
        labels.update(zip(same, (name + suffix for suffix in told), strict=True))
    return [
        Setup(found[0].title, labels[place], tuple(found))
        for place, found in enumerate(groups)
    ]


def split_of(setups: Sequence[Setup]) -> str:
    """Return which split the clients of setups over the same data were tested on."""
    return setups[0].runs[0].evaluated_on


def departures(firsts: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the settings in which runs, one of each setup, differ; and their cells."""
    settings = [run.settings for run in firsts]
    keys = [
        key
        for key in dict.fromkeys(key for one in settings for key in one)
        if len({as_text(one[key]) for one in settings if key in one}) > 1
    ]
    return keys, [
        [as_text(one[key]) if key in one else ABSENT for key in keys]
        for one in settings
    ]


def in_common(firsts: Sequence[Run]) -> dict[str, str]:
    """Return the settings that all runs have with the same value, as text."""
    first, *others = [run.settings for run in firsts]
    return {
        key: as_text(value)
        for key, value in first.items()
        if all(key in one and one[key] == value for one in others)
    }


def _told_apart(firsts: Sequence[Run]) -> list[str]:
    """Return what tells each of some runs of one title from the others."""
    if len(firsts) == 1:
        return [""]
    keys, cells = departures(firsts)
    ends = [key.rpartition(".")[2] for key in keys]
    short = [
        key if ends.count(end) > 1 else end for key, end in zip(keys, ends, strict=True)
    ]
    named = [zip(short, one, strict=True) for one in cells]
    by_keys = [
        "".join(f", {key} {cell}" for key, cell in one if cell != ABSENT)
        for one in named
    ]
    by_names = [f" ({run.name})" for run in firsts]
    for suffixes in (by_keys if 0 < len(keys) <= MOST_IN_LABEL else [], by_names):
        if len(set(suffixes)) == len(firsts):
            return suffixes
    return [f" ({run.path})" for run in firsts]


def as_text(value: Any) -> str:
    """Return the value of a setting as tables have it."""
    return value if isinstance(value, str) else json.dumps(value)


_CLIENTS = "clients.csv"
_NEEDED_COLUMNS = frozenset(("client", "seen", "num_test", ACCURACY))


@dataclass(frozen=True, slots=True)  # there may be a million
class ClientRow:
    """A client of a run that has test examples."""

    client: str
    seen: bool
    num_test: Count
    accuracy: Number  # or another metric, as it was asked for
    accuracy_global: Number
    knn_weight: Number | None = None
    num_stored: Count | None = None
    # With virtual time, of those that trained.
    num_rounds: Count | None = None
    round_seconds: Number | None = None
    staleness: Number | None = None


_CLIENT_ROW = TypeAdapter(ClientRow)
C = TypeVar("C", ClientRow, ClientCounts)


def client_rows(setup: Setup) -> Iterator[ClientRow]:
    """Yield the clients of all seeds that have test examples."""
    for run in setup.runs:
        if has_clients(run.path):
            yield from clients_of(run.path)


def has_clients(run: Path) -> bool:
    """Return whether a run's folder has the file of its clients."""
    return (run / _CLIENTS).is_file()


def clients_of(run: Path, metric: str = ACCURACY) -> Iterator[ClientRow]:
    """Yield the clients of a finished run that have test examples, and the metric."""
    path, names = run / _CLIENTS, columns_of(ACCURACY)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if missing := _NEEDED_COLUMNS.difference(reader.fieldnames or ()):
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(f"{row['client']!r} has another number of cells")
                if not row[ACCURACY]:
                    continue
                values = [row.get(column, "") for column in columns_of(metric)]
                row.update(zip(names, values, strict=True))
                if all(values):
                    known = {key: one for key, one in row.items() if one}
                    yield _CLIENT_ROW.validate_python(known)
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise RunError(
            f"{path} is missing or damaged, expected the columns of a run: {error}"
        ) from error


MOST_CLIENTS = 10_000


def sampled(clients: Iterable[C]) -> list[C]:
    """Return at most `MOST_CLIENTS` of the clients, in their order.

    Those whose names have the smallest SHA-256: by nothing but chance, and of each run
    the same ones.
    """

    def rank(numbered: tuple[int, C]) -> bytes:
        return hashlib.sha256(numbered[1].client.encode()).digest()

    chosen = heapq.nsmallest(MOST_CLIENTS, enumerate(clients), key=rank)
    return [one for _, one in sorted(chosen, key=operator.itemgetter(0))]


def note_on_sample(counts: Iterable[tuple[str, int, int]]) -> str:
    """Return a sentence on what is cut, of (what, number drawn, number of all)."""
    cut = [
        f"{drawn:,} of the {total:,} {what}"
        for what, drawn, total in counts
        if drawn < total
    ]
    sample = "a sample by the SHA-256 of their names"
    return f"Drawn are {'; '.join(cut)}: {sample}." if cut else ""


def fraction_degraded_against(
    clients: Iterable[ClientRow], by_client: Mapping[str, float], metric: str = ACCURACY
) -> float | None:
    """Return `fraction_degraded` against another model's metric by client."""
    pairs = ((it.accuracy, by_client.get(it.client)) for it in clients)
    return fraction_degraded(pairs, metric)


def comparability(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield sentences on what makes the setups hard to compare."""
    runs = [run for setup in setups for run in setup.runs]
    # A split makes a table of its own: here all are, or none.
    if any(run.evaluated_on == VALIDATION for run in runs):
        yield (
            "These runs were evaluated on validation data (partition.evaluate_on: "
            "validation): they choose settings, and are no results on test data."
        )
    if len({tuple(run.seed for run in setup.runs) for setup in setups}) > 1:
        yield "Not all setups have the same seeds: their means are over other splits."
    seeds = {run.seed for run in runs}
    if len({(run.seed, run.split_hash) for run in runs}) > len(seeds):
        yield (
            "Runs with the same seed have different splits of the data: compare their "
            "averages with care, and their clients not at all."
        )
    fingerprints = (fingerprint_in(run.path) for run in runs)
    versions = list(filter(None, fingerprints))
    if len(set(versions)) > 1:
        yield (
            f"The runs were not made by the same code: {CODE} has {len(set(versions))} "
            f"versions in {len(versions)} runs. That may be why figures differ."
        )
    for run in runs:
        step = run.results.get("model_distribution", {})
        withheld, offline = (len(step.get(key, ())) for key in ("withheld", "offline"))
        if withheld or offline:
            yield (
                f"{run.name}: {withheld} clients keep their figures to themselves, "
                f"{offline} did not have the model yet; they are in no figure."
            )


def _was_tested(run: Run) -> bool:
    return any(run.results[group]["num_clients"] for group in GROUPS)


# What charts are drawn from, each with which runs ought to have it.
_FILES: Mapping[str, Callable[[Run], bool]] = {
    "rounds.jsonl": lambda run: bool(run.results["training"].get("num_rounds")),
    "clients.csv": _was_tested,
    "personalization.jsonl": _was_tested,
}


def missing_files(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield sentences on files that only some runs lack: charts go without those."""
    for name, expected in _FILES.items():
        runs = [run for setup in setups for run in setup.runs]
        there = {run.path for run in runs if (run.path / name).is_file()}
        for setup in setups if there else ():
            own = setup.runs
            lacking = [run for run in own if expected(run) and run.path not in there]
            if lacking and len(lacking) == len(own):
                yield f"{setup.label} has no {name}: its charts leave it out."
            elif lacking:
                yield (
                    f"{len(lacking)} of the {len(own)} runs of {setup.label} lack "
                    f"{name} ({', '.join(str(run.path) for run in lacking)}): its "
                    "charts are of the others."
                )


_TOLD_BY_COUNTS = ("num_clients", "unseen_fraction")
# Of a partition; with another one the same clients are tested on the same data.
_TREATMENT = "unseen_train_fraction"
FINGERPRINT = 12  # digits


@dataclass(frozen=True)
class FederatedData:
    """A data set and its partition over clients."""

    data: str
    partition: str

    @property
    def title(self) -> str:
        """Both in one line."""
        return f"{self.data}; {self.partition}"


def facts_of(over: FederatedData, setups: Sequence[Setup]) -> dict[str, str]:
    """Return what stands at the top of a report, by its name."""
    runs = [run for setup in setups for run in setup.runs]
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    models: dict[str, list[str]] = {}
    for setup in setups:
        models.setdefault(model_of(setup.runs[0]), []).append(setup.label)
    told = [
        model if len(models) == 1 else f"{model} ({', '.join(labels)})"
        for model, labels in models.items()
    ]
    return {
        "data set": over.data,
        "partition": over.partition,
        "model": "; ".join(told),
        "seed" if len(seeds) == 1 else "seeds": ", ".join(map(str, seeds)) or UNKNOWN,
    }


def by_data(runs: Sequence[Run]) -> list[tuple[FederatedData, list[Run]]]:
    """Return the runs over each data set and partition, in the order of the first."""
    # The data are the same if their content is; where that is not known, as of
    # ``flwr run``, the settings decide.
    groups: list[list[Run]] = []
    for run in runs:
        found = next((group for group in groups if _is_over(run, group)), None)
        if found is None:
            groups.append(found := [])
        found.append(run)
    named = [_federated_data(group) for group in groups]
    return [
        (over if named.count(over) == 1 else _with_content(over, group), group)
        for over, group in zip(named, groups, strict=True)
    ]


def model_of(run: Run) -> str:
    """Return the name of what a run trains, with its settings."""
    return _told(run, "model", MODELS)


def _is_over(run: Run, group: Sequence[Run]) -> bool:
    same = False
    for other in group:
        of_run, of_other = run.section("partition"), other.section("partition")
        contents = {_content(run), _content(other)}
        is_known = "" not in contents
        if {**of_run, _TREATMENT: None} != {**of_other, _TREATMENT: None} or (
            is_known and len(contents) > 1
        ):
            return False
        same = same or is_known or run.section("data") == other.section("data")
    return same


def _content(run: Run) -> str:
    """Return the fingerprint of the data of a run; empty is not known."""
    inputs = read_inputs(run.path)
    return "" if inputs is None else inputs.data


def _federated_data(runs: Sequence[Run]) -> FederatedData:
    run = runs[0]
    treatments = {as_text(one.section("partition").get(_TREATMENT)) for one in runs}
    left_out = (_TREATMENT,) if len(treatments) > 1 else ()  # labels tell it
    counts = ((group, run.results[group]["num_clients"]) for group in GROUPS)
    clients = " and ".join(f"{count} {group}" for group, count in counts if count)
    more = [f"{clients} clients"] if clients else []
    return FederatedData(
        _told(run, "data", DATA_SETS),
        _told(run, "partition", PARTITIONS, left_out, more),
    )


def _with_content(over: FederatedData, runs: Sequence[Run]) -> FederatedData:
    """Return it with what alone tells it from another: a fingerprint, or its place."""
    content = next(filter(None, map(_content, runs)), "")
    what = f"content {content[:FINGERPRINT]}" if content else f"of {runs[0].path}"
    return replace(over, data=f"{over.data}, {what}")


def _told(
    run: Run,
    section: str,
    specs: Mapping[str, Any],
    left_out: Sequence[str] = (),
    more: Sequence[str] = (),
) -> str:
    """Return the title of what a section names, with its settings in words."""
    settings = run.section(section)
    title = name = str(settings.pop("name", UNKNOWN))
    told = list[str]()
    if name in specs:
        title, kind = specs[name].title, specs[name].settings_type
        always = inspect.get_annotations(kind) if section == "partition" else {}
        defaults = {
            field.name: to_jsonable_python(field.default)
            for field in dataclasses.fields(kind)
            if field.default is not dataclasses.MISSING
        }
        usual = dict(dotted(defaults))
        told = [
            f"{TERMS.get(f'{section}.{key}', key)} {as_text(value)}"
            for key, value in settings.items()
            if key not in (*_TOLD_BY_COUNTS, *left_out)
            and (key in always or key not in usual or usual[key] != value)
        ]
    told += more
    return f"{title} ({', '.join(told)})" if told else title


def repetition_of(setup: Setup, label: str, number: int) -> Mapping[str, Any]:
    """Return how the runs of a setup, the ``number``-th of a report, were made."""
    file, experiment = f"experiment-{number}.yaml", setup.runs[0].experiment
    return {
        "label": label,
        "file": file,
        "commands": [
            f"knnper simulate {file} --set run.seed={run.seed} "
            f"--output runs/again-{number}-seed-{run.seed}"
            for run in setup.runs
            if run.seed is not None
        ],
        "experiment": dump_yaml(experiment) if experiment else "",
        "origins": list(map(_origin, setup.runs)),
    }


def _origin(run: Run) -> dict[str, str]:
    return {
        "run": run.name,
        "seed": UNKNOWN if run.seed is None else str(run.seed),
        "started": str(run.manifest.get("started", UNKNOWN)),
        "command": shlex.join(run.manifest.get("command", ())) or UNKNOWN,
        "partition_hash": run.split_hash,
        "state_sha256": str(run.results["training"].get("state_sha256", UNKNOWN)),
    }


def environments(runs: Sequence[Run]) -> list[str]:
    """Return with what the runs were made, each with how many of them."""
    counts = Counter(environment_text(run.manifest) for run in runs)
    if len(counts) == 1:
        return list(counts)
    return [f"{text} ({count} of the runs)" for text, count in counts.items()]


def environment_text(manifest: Mapping[str, Any]) -> str:
    """Return the versions and the machine of a manifest as a phrase."""
    machine = manifest.get("platform", UNKNOWN)
    cores = manifest.get("num_cpus", "?")
    return f"{versions_text(manifest)}; {machine}; {cores} CPU cores"


def versions_text(manifest: Mapping[str, Any]) -> str:
    """Return the versions of a manifest as a phrase."""
    versions = manifest.get("versions", {})
    packages = (f"{name} {version}" for name, version in versions.items() if version)
    return ", ".join(packages) or UNKNOWN


# What a row calls the figures of a metric, see `figure_of`.
FIGURES: Mapping[str, str] = {
    "average": "weighted",
    "mean": "mean",
    "bottom_decile": "bottom_decile",
    "worst": "worst",
    "fraction_degraded": "fraction_degraded",
}
_POOLED = ("ece", "log_loss")  # and those of all examples together, by their own names
FEDAVG = METHODS["fedavg"].title
VS_FEDAVG = "fraction_degraded_vs_fedavg"
VS_GLOBAL = "global"  # the unpersonalised model of the same run, see `degraded_vs`


def degraded_vs(model: str) -> str:
    """Return what tables call `fraction_degraded` of results against a model."""
    return f"degraded vs {model}"


@dataclass(frozen=True)
class Row:
    """How one model did on one group of clients."""

    label: str  # no two rows of a group share one
    method: str
    setup: str
    group: str
    runs: tuple[str, ...]  # the names of the folders, one a seed
    model: str
    metric: str
    # By the names of `FIGURES`; ``gain`` is over the unpersonalised model of the same
    # run, `VS_FEDAVG` against the one FedAvg of the table over the same split.
    figures: Mapping[str, Estimate]
    num_clients: int  # of the first run, as the rounds
    num_rounds: int | None
    seconds: float | None  # training, and personalisation where there is one: mean
    is_reference: bool  # an unpersonalised model

    def text(self, name: str, *, sign: bool = False) -> str:
        """Return a figure as text, in percent where it is a fraction."""
        found = self.figures[name]
        if called(self.metric).is_fraction or "degraded" in name:
            return found.percent() if sign else found.text()
        return found.text(1, 3)

    @property
    def times(self) -> list[str]:
        """Rounds and seconds as text."""
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        return ["-" if self.num_rounds is None else str(self.num_rounds), seconds]


def metrics_of(setups: Iterable[Setup]) -> list[str]:
    """Return what the clients of some run were measured by, the accuracy first."""
    named = [one for setup in setups for run in setup.runs for one in run.metrics]
    return list(dict.fromkeys(named))


def table_of(setups: Sequence[Setup], metric: str = ACCURACY) -> list[Row]:
    """Return the rows of a table that compares setups: seen clients, then unseen."""
    fedavg = _fedavg_of(setups, metric)
    found = [
        (_model(setup, is_reference), _row(setup, group, fedavg, is_reference, metric))
        for group in GROUPS
        for setup in setups
        if setup.runs[0].figures(group)["num_clients"]
        for is_reference in (True, False)
        if not is_reference or is_apart(setup, group)
    ]
    models: dict[str, set[Model]] = defaultdict(set)
    for model, row in found:
        models[row.method].add(model)
    shown = {(row.group, model) for model, row in found if not row.is_reference}
    table, labels = list[Row](), dict[Model, str]()
    for model, row in found:
        if row.is_reference:
            # An unpersonalised model is called the same in all groups of clients.
            whose = f" of {row.setup}" if len(models[row.method]) > 1 else ""
            label = labels.setdefault(model, row.label + whose)
            if (row.group, model) in shown:
                continue
            shown.add((row.group, model))
            row = replace(row, label=label)
        table.append(row)
    return table


def tables_of_run(folder: Path) -> list[list[list[str]]]:
    """Return the table of one run, and one of each other metric, see `as_cells`."""
    run = load_run(folder)
    return [as_cells(table_of(setups_of([run]), metric)) for metric in run.metrics]


def as_documents(rows: Iterable[Row], over: FederatedData) -> list[dict[str, Any]]:
    """Return the rows as plain values, fractions of 1; None is not known."""
    before = ("model", "label", "method", "setup", "group", "metric")
    behind = ("num_clients", "num_rounds", "seconds", "is_reference")
    documents = []
    for row in rows:
        document: dict[str, Any] = {"data": over.data, "partition": over.partition}
        document |= {name: getattr(row, name) for name in before}
        document["runs"] = list(row.runs)
        for name, one in row.figures.items():
            document |= one.flat(name)
        documents.append(document | {name: getattr(row, name) for name in behind})
    return documents


def as_csv(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return what `as_documents` does, a column each; empty where there is none."""
    return csv_text(
        [
            {**one, "runs": " ".join(one["runs"])}
            | {"is_reference": str(one["is_reference"])}
            for one in documents
        ]
    )


def as_cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return a header and the rows as text; with the seeds where there are several."""
    several = any(len(row.runs) > 1 for row in rows)
    degraded = degraded_columns(rows)
    others = {called(row.metric).title for row in rows if row.metric != ACCURACY}
    average = " ".join(["average", *others])
    header = ["method", "group", average, "bottom decile", *degraded]
    header += ["clients", *(["seeds"] if several else []), "rounds", "seconds"]
    shown = ("average", "bottom_decile", *degraded.values())
    cells = [header]
    for row in rows:
        figures = [row.text(name, sign=True) for name in shown]
        seeds = [str(len(row.runs))] if several else []
        numbers = [*figures, str(row.num_clients), *seeds, *row.times]
        cells.append([row.label, row.group, *numbers])
    return cells


def table_of_group(rows: Sequence[Row], degraded: Mapping[str, str]) -> Table:
    """Return what a report shows of a group of clients, all rows of one metric."""
    metric, group = called(rows[0].metric), rows[0].group.capitalize()
    named = "" if rows[0].metric == ACCURACY else f": {metric.title}"
    percent, points = (", %", ", points") if metric.is_fraction else ("", "")
    header = ["method", f"average{percent}", f"gain{points}", f"bottom decile{percent}"]
    header += [*(f"{name}, %" for name in degraded), "calibration error, %", "log-loss"]
    header += ["clients", "seeds", "rounds", "seconds"]
    shown = ("average", "gain", "bottom_decile", *degraded.values())
    cells = [header]
    for row in rows:
        pooled = [row.figures["ece"].text(), row.figures["log_loss"].text(1, 3)]
        counts = [str(row.num_clients), str(len(row.runs)), *row.times]
        cells.append([row.label, *map(row.text, shown), *pooled, *counts])
    return Table.of_cells(f"{group} clients{named}", cells)


def degraded_columns(rows: Sequence[Row]) -> dict[str, str]:
    """Return the columns of fractions degraded."""
    # That against FedAvg is one where it says more than that against the own global.
    columns = {degraded_vs(VS_GLOBAL): "fraction_degraded"}
    if any(
        row.figures[VS_FEDAVG].mean not in (None, row.figures["fraction_degraded"].mean)
        for row in rows
    ):
        columns[degraded_vs(FEDAVG)] = VS_FEDAVG
    return columns


# By seed the split, and the clients' metric with FedAvg's model.
Fedavg = Mapping[int | None, tuple[str, Mapping[str, float]]]


def _fedavg_of(setups: Sequence[Setup], metric: str) -> Fedavg:
    """Return FedAvg's model of a table; nothing where there is none, or several."""
    whole = [setup for setup in setups if setup.title == FEDAVG]
    column = "accuracy" if whole else "accuracy_global"
    goes_on = [one for one in setups if one.runs[0].reference_title == FEDAVG]
    found = {_model(one, not whole): one for one in whole or goes_on}
    if len(whole) > 1 or len(setups) < 2 or len(found) != 1:
        return {}
    (setup,) = found.values()
    return {
        run.seed: (
            run.split_hash,
            {one.client: getattr(one, column) for one in clients_of(run.path, metric)},
        )
        for run in setup.runs
        if has_clients(run.path)
    }


def _vs_fedavg(
    run: Run, group: str, fedavg: Fedavg, is_reference: bool, metric: str
) -> float | None:
    split, values = fedavg.get(run.seed, ("", {}))
    if split != run.split_hash or not has_clients(run.path):
        return None
    is_seen = group == "seen"
    clients = [one for one in clients_of(run.path, metric) if one.seen == is_seen]
    if is_reference:
        clients = [replace(one, accuracy=one.accuracy_global) for one in clients]
    return fraction_degraded_against(clients, values, metric)


def is_apart(setup: Setup, group: str) -> bool:
    """Return whether the unpersonalised model means anything, and is another one."""
    personal = [dict(run.figures(group)) for run in setup.runs]
    return setup.has_reference and any(one.pop("global") != one for one in personal)


def _row(
    setup: Setup, group: str, fedavg: Fedavg, is_reference: bool, metric: str
) -> Row:
    first = setup.runs[0]
    by_seed = [run.figures(group) for run in setup.runs]
    if is_reference:
        by_seed = [one["global"] for one in by_seed]
    names = {name: figure_of(metric, key) for name, key in FIGURES.items()}
    names |= {name: name for name in _POOLED}
    figures = {
        name: estimate(one.get(key) for one in by_seed) for name, key in names.items()
    }
    is_compared = setup.has_reference and not is_reference
    gains = (_gain(one, metric) for one in by_seed)
    figures["gain"] = estimate(gains if is_compared else ())
    figures[VS_FEDAVG] = estimate(
        _vs_fedavg(run, group, fedavg, is_reference, metric) for run in setup.runs
    )
    method = str(first.reference_title) if is_reference else setup.title
    return Row(
        label=method if is_reference else setup.label,
        method=method,
        setup=setup.label,
        group=group,
        runs=tuple(run.name for run in setup.runs),
        model=model_of(first),
        metric=metric,
        figures=figures,
        num_clients=by_seed[0]["num_clients"],
        num_rounds=first.results["training"].get("num_rounds"),
        seconds=estimate(_seconds(run, is_reference) for run in setup.runs).mean,
        is_reference=is_reference,
    )


Model = tuple[object, ...]
# These tell models apart whose states are not known, or that were tested on others.
_TELLING = ("accuracy_weighted", "accuracy_bottom_decile", "num_clients")


def _model(setup: Setup, is_reference: bool) -> Model:
    """Return by what a model is known: setups may share one, whatever they add."""
    title = setup.runs[0].reference_title if is_reference else setup.title
    results = [run.results[group] for group in GROUPS for run in setup.runs]
    found = [one["global"] for one in results] if is_reference else results
    return (
        title,
        *(run.results["training"].get("state_sha256") for run in setup.runs),
        *(one.get(name) for one in found for name in _TELLING),
    )


def _gain(figures: Mapping[str, Any], metric: str) -> float | None:
    name = figure_of(metric, FIGURES["average"])
    own, reference = (one.get(name) for one in (figures, figures.get("global", {})))
    return None if own is None or reference is None else gain(metric, own, reference)


def _seconds(run: Run, is_reference: bool) -> float | None:
    training = run.results["training"]
    seconds: float | None = training.get("seconds")
    if seconds is None or is_reference:
        return seconds
    return seconds + float(training.get("personalization_seconds", 0.0))


# One of them is there, or grows, as soon as a run, a round or a part is done.
RESULT_FILES = ("results.json", "rounds.jsonl", "failed.txt", "parts.jsonl")
