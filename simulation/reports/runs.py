"""Finished runs: which there are, what sets them apart, and the table of them."""

import csv
import dataclasses
import functools
import inspect
import json
import math
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from knnper.data.catalogue import DATA_SETS
from knnper.errors import ConfigError, RunError
from knnper.experiment import dotted, dump_yaml, load_experiment, to_document
from knnper.models import MODELS
from knnper.server.results import fraction_degraded, summarise
from knnper.server.run_folder import EXPERIMENT, RESULTS, RunFolder
from knnper.simulation.batches.folder import CODE, read_inputs
from knnper.simulation.batches.plan import TERMS
from knnper.simulation.partition.schemes import PARTITIONS
from knnper.simulation.reports.tables import VS_GLOBAL, csv_text, degraded_vs
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.catalogue import METHODS, title_of
from knnper.strategies.core.method import AS_IT_IS

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean of a figure over some runs, and how sure it is."""

    mean: float | None
    std: float | None
    half_width: float | None
    count: int

    def flat(
        self, name: str, deviation: str = "_std", half: str = "_half_width"
    ) -> dict[str, float | None]:
        """Return mean, deviation and half width by their names in a file."""
        return {
            name: self.mean,
            f"{name}{deviation}": self.std,
            f"{name}{half}": self.half_width,
        }


def estimate(values: Iterable[float | None]) -> Estimate:
    """Return mean and interval of the values that are there."""
    # Half of it is t · s / √n: t the 97.5 % quantile of Student's distribution with
    # n - 1 degrees of freedom, s the sample's standard deviation.
    found = [value for value in values if value is not None]
    mean = statistics.fmean(found) if found else None
    if len(found) < 2:
        return Estimate(mean, None, None, len(found))
    # A server of real clients reports one run, and has no scipy.
    from scipy.special import stdtrit

    std = statistics.stdev(found)
    quantile = float(stdtrit(len(found) - 1, (1 + CONFIDENCE) / 2))
    return Estimate(mean, std, quantile * std / math.sqrt(len(found)), len(found))


GROUPS = ("seen", "unseen")

EVERYBODY = "all"

VALIDATION = "validation"
"""What `Run.evaluated_on` says of runs that compare settings."""

_LEFT_OUT = ("name", "run")


@dataclass(frozen=True)
class Run:
    """A finished run."""

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
        model = self.results["training"]["state_sha256"]
        handed = self.folder.distributed.reported(model).values()
        everybody = summarise([result for result in handed if result is not None])
        return everybody.as_document()

    @property
    def average(self) -> float:
        """Weighted accuracy over the seen clients, 0 where there is none."""
        return float(self.results["seen"].get("accuracy_weighted") or 0.0)


def load_run(path: Path) -> Run:
    """Return the finished run in the folder ``path``."""
    results = RunFolder.open(path).results()
    missing = {"method", "training", "manifest", *GROUPS} - results.keys()
    if missing:
        raise RunError(
            f"{path / RESULTS} is damaged: {', '.join(sorted(missing))} missing"
        )
    return Run(path, results)


def find_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs in ``paths``: each a run's folder, or one that holds runs."""
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
    return once, list(dict.fromkeys(remarks))


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
    """Return an experiment with the settings that came after it, at their defaults."""
    try:
        return to_document(load_experiment(experiment, experiment_catalogue()))
    except ConfigError:
        return experiment


MOST_IN_LABEL = 3
"""Departures that are told in a label; with more of them it has the run's name."""

ABSENT = "-"


@dataclass(frozen=True)
class Setup:
    """Runs that differ in the seed alone: one row of a table, one line of a chart."""

    title: str
    suffix: str
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """How it is named in tables and charts, in no two setups the same."""
        return self.title + self.suffix

    @property
    def has_reference(self) -> bool:
        """Whether its unpersonalised model means anything."""
        return self.runs[0].reference_title is not None


@dataclass(frozen=True)
class Departures:
    """In which settings setups differ."""

    keys: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]


def setups_of(runs: Iterable[Run]) -> list[Setup]:
    """Return the setups of ``runs``, in the order of each one's first run."""
    # A second run with the same seed is no further evidence: it makes another setup.
    kinds: dict[tuple[str, int], list[Run]] = {}
    times: Counter[tuple[str, int | None]] = Counter()
    for run in runs:
        kinds.setdefault((run.kind, times[run.kind, run.seed]), []).append(run)
        times[run.kind, run.seed] += 1
    by_seed = [
        tuple(sorted(found, key=lambda run: run.seed or 0)) for found in kinds.values()
    ]
    suffixes = _suffixes(by_seed)
    return [
        Setup(found[0].title, suffix, found)
        for found, suffix in zip(by_seed, suffixes, strict=True)
    ]


def split_of(setups: Sequence[Setup]) -> str:
    """Return which split the clients of setups over the same data were tested on."""
    return setups[0].runs[0].evaluated_on


def departures(firsts: Sequence[Run]) -> Departures:
    """Return where the settings of runs, one of each setup, differ."""
    settings = [run.settings for run in firsts]
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = tuple(
        key
        for key in keys
        if len({as_text(one[key]) for one in settings if key in one}) > 1
    )
    cells = tuple(
        tuple(as_text(one[key]) if key in one else ABSENT for key in differing)
        for one in settings
    )
    return Departures(differing, cells)


def in_common(firsts: Sequence[Run]) -> dict[str, str]:
    """Return the settings that all runs have with the same value, as text."""
    first, *others = [run.settings for run in firsts]
    return {
        key: as_text(value)
        for key, value in first.items()
        if all(key in one and one[key] == value for one in others)
    }


def _suffixes(setups: Sequence[tuple[Run, ...]]) -> list[str]:
    """Return for each setup what tells it from the others of its title."""
    suffixes = [""] * len(setups)
    for title in {found[0].title for found in setups}:
        places = [n for n, found in enumerate(setups) if found[0].title == title]
        if len(places) > 1:
            told = _told_apart([setups[place][0] for place in places])
            for place, suffix in zip(places, told, strict=True):
                suffixes[place] = suffix
    return suffixes


def _told_apart(firsts: Sequence[Run]) -> list[str]:
    found = departures(firsts)
    suffixes = [_suffix(found.keys, cells) for cells in found.cells]
    if not 0 < len(found.keys) <= MOST_IN_LABEL or len(set(suffixes)) < len(suffixes):
        suffixes = [f" ({run.name})" for run in firsts]
    if len(set(suffixes)) < len(suffixes):
        suffixes = [f" ({run.path})" for run in firsts]
    return suffixes


def _suffix(keys: Sequence[str], cells: Sequence[str]) -> str:
    told = zip(_short(keys), cells, strict=True)
    return "".join(f", {key} {cell}" for key, cell in told if cell != ABSENT)


def _short(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key; the whole key where two end alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [
        key if ends.count(end) > 1 else end for key, end in zip(keys, ends, strict=True)
    ]


def as_text(value: Any) -> str:
    """Return the value of a setting as tables have it."""
    return value if isinstance(value, str) else json.dumps(value)


_CLIENTS = "clients.csv"


@dataclass(frozen=True)
class ClientRow:
    """A client of a run that has test examples."""

    client: str
    seen: bool
    num_test: int
    accuracy: float
    accuracy_global: float
    knn_weight: float | None
    num_stored: int | None


def client_rows(setup: Setup) -> list[ClientRow]:
    """Return the clients of all seeds that have test examples."""
    return [
        row
        for run in setup.runs
        if has_clients(run.path)
        for row in clients_of(run.path)
    ]


def has_clients(run: Path) -> bool:
    """Return whether a run's folder has the file of its clients."""
    return (run / _CLIENTS).is_file()


def clients_of(run: Path) -> list[ClientRow]:
    """Return the clients of a finished run that have test examples."""
    path = run / _CLIENTS
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [_parse(row) for row in csv.DictReader(file) if row["accuracy"]]
    except (OSError, KeyError, ValueError) as error:
        raise RunError(
            f"{path} is missing or damaged, expected the columns of a run: {error}"
        ) from error


def fraction_degraded_against(
    clients: Iterable[ClientRow], accuracies: Mapping[str, float]
) -> float | None:
    """Return `fraction_degraded` against another model's accuracies by client."""
    return fraction_degraded(
        (one.accuracy, accuracies.get(one.client)) for one in clients
    )


def _parse(row: Mapping[str, str]) -> ClientRow:
    weight, stored = row.get("knn_weight"), row.get("num_stored")
    return ClientRow(
        client=row["client"],
        seen=row["seen"] == "true",
        num_test=int(row["num_test"]),
        accuracy=float(row["accuracy"]),
        accuracy_global=float(row["accuracy_global"]),
        knn_weight=float(weight) if weight else None,
        num_stored=int(float(stored)) if stored else None,
    )


def comparability(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield sentences on what makes the setups hard to compare."""
    runs = [run for setup in setups for run in setup.runs]
    # A split makes a table of its own: here all are, or none.
    if any(run.evaluated_on == VALIDATION for run in runs):
        yield (
            "These runs were evaluated on validation data (partition.evaluate_on: "
            "validation). Such figures choose settings; they are no results on test "
            "data."
        )
    if len({tuple(run.seed for run in setup.runs) for setup in setups}) > 1:
        yield (
            "Not all setups have the same seeds; their means are over different splits "
            "of the data."
        )
    splits: dict[int | None, set[str]] = defaultdict(set)
    for run in runs:
        splits[run.seed].add(str(run.manifest.get("partition_hash")))
    if any(len(hashes) > 1 for hashes in splits.values()):
        yield (
            "Runs with the same seed have different splits of the data: compare their "
            "averages with care, and their clients not at all."
        )
    files = (run.path / CODE for run in runs)
    told = [
        path.read_text(encoding="utf-8").strip() for path in files if path.is_file()
    ]
    versions = list(filter(None, told))
    if len(set(versions)) > 1:
        yield (
            f"The runs were not made by the same code: {CODE} has "
            f"{len(set(versions))} versions in {len(versions)} runs. What changed "
            "between them may be what makes the figures differ."
        )
    for setup in setups:
        yield from _missing_clients(setup)


def missing_files(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield sentences on files that only some runs lack: charts go without those."""
    for name, expected in _FILES.items():
        if not any((run.path / name).is_file() for one in setups for run in one.runs):
            continue
        for setup in setups:
            if lacking := _lacking(setup, name, expected):
                yield _lack(setup, lacking, name)


def _missing_clients(setup: Setup) -> Iterator[str]:
    for run in setup.runs:
        hand_over = run.results.get("model_distribution", {})
        num_withheld = len(hand_over.get("withheld", ()))
        num_away = len(hand_over.get("offline", ()))
        if num_withheld or num_away:
            yield (
                f"{run.name}: {num_withheld} clients keep their figures to themselves, "
                f"{num_away} did not have the model yet; they are in no figure."
            )


def _was_tested(run: Run) -> bool:
    return any(run.results[group]["num_clients"] for group in GROUPS)


def _was_trained(run: Run) -> bool:
    return bool(run.results["training"].get("num_rounds"))


_FILES: Mapping[str, Callable[[Run], bool]] = {
    "rounds.jsonl": _was_trained,
    "clients.csv": _was_tested,
    "personalization.jsonl": _was_tested,
}
"""What charts are drawn from, each with which runs ought to have it."""


def _lacking(setup: Setup, name: str, expected: Callable[[Run], bool]) -> list[Run]:
    return [
        run for run in setup.runs if expected(run) and not (run.path / name).is_file()
    ]


def _lack(setup: Setup, lacking: Sequence[Run], name: str) -> str:
    if len(lacking) == len(setup.runs):
        return f"{setup.label} has no {name}: the charts of that file leave it out."
    places = ", ".join(str(run.path) for run in lacking)
    told = (
        f"{len(lacking)} of the {len(setup.runs)} runs of {setup.label} lack {name} "
        f"({places}): "
    )
    return f"{told}the charts of that file are of the others."


_UNKNOWN = "not known"

_TOLD_BY_COUNTS = ("num_clients", "unseen_fraction")

_TREATMENT = "unseen_train_fraction"
"""Of a partition; with another one the same clients are tested on the same data."""

_FINGERPRINT = 12  # digits


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
        "seed" if len(seeds) == 1 else "seeds": ", ".join(map(str, seeds)) or _UNKNOWN,
    }


def by_data(runs: Sequence[Run]) -> list[tuple[FederatedData, list[Run]]]:
    """Return the runs over each data set and partition, in the order of the first."""
    # The data are the same if their content is; where that is not known, as of
    # ``flwr run``, the settings decide.
    groups: list[list[Run]] = []
    for run in runs:
        found = next((group for group in groups if _is_over(run, group)), None)
        if found is None:
            groups.append([run])
        else:
            found.append(run)
    named = [_federated_data(group) for group in groups]
    return [
        (over if named.count(over) == 1 else _with_content(over, group), group)
        for over, group in zip(named, groups, strict=True)
    ]


def model_of(run: Run) -> str:
    """Return the name of what a run trains, with its settings."""
    return _with(*_told(run, "model", MODELS))


def _is_over(run: Run, group: Sequence[Run]) -> bool:
    same = False
    for other in group:
        if _dealt(run) != _dealt(other):
            return False
        contents = {_content(run), _content(other)}
        if "" not in contents:
            if len(contents) > 1:
                return False
            same = True
        same = same or _section(run, "data") == _section(other, "data")
    return same


def _dealt(run: Run) -> dict[str, Any]:
    """Return what of a partition decides what clients are tested on."""
    settings = _section(run, "partition")
    return {key: value for key, value in settings.items() if key != _TREATMENT}


def _content(run: Run) -> str:
    """Return the fingerprint of the data of a run; empty is not known."""
    inputs = read_inputs(run.path)
    return "" if inputs is None else inputs.data


def _section(run: Run, section: str) -> dict[str, Any]:
    """Return the settings of a section by their names in it."""
    return {
        key.removeprefix(f"{section}."): value
        for key, value in run.settings.items()
        if key.startswith(f"{section}.")
    }


def _federated_data(runs: Sequence[Run]) -> FederatedData:
    run = runs[0]
    treatments = {as_text(_section(one, "partition").get(_TREATMENT)) for one in runs}
    of_labels = [_TREATMENT] if len(treatments) > 1 else []
    partition, settings = _told(run, "partition", PARTITIONS, of_labels)
    counts = ((group, run.results[group]["num_clients"]) for group in GROUPS)
    clients = " and ".join(f"{count} {group}" for group, count in counts if count)
    if clients:
        settings.append(f"{clients} clients")
    return FederatedData(
        _with(*_told(run, "data", DATA_SETS)), _with(partition, settings)
    )


def _with_content(over: FederatedData, runs: Sequence[Run]) -> FederatedData:
    """Return it with what alone tells it from another: a fingerprint, or its place."""
    content = next(filter(None, map(_content, runs)), "")
    what = f"content {content[:_FINGERPRINT]}" if content else f"of {runs[0].path}"
    return replace(over, data=f"{over.data}, {what}")


def _told(
    run: Run,
    section: str,
    specs: Mapping[str, Any],
    told_elsewhere: Sequence[str] = (),
) -> tuple[str, list[str]]:
    """Return the title of what a section names, and its settings in words."""
    settings = _section(run, section)
    name = str(settings.pop("name", _UNKNOWN))
    if name not in specs:
        return name, []
    kind = specs[name].settings_type
    always = inspect.get_annotations(kind) if section == "partition" else {}
    usual = {
        field.name: to_jsonable_python(field.default)
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING
    }
    return specs[name].title, [
        f"{TERMS.get(f'{section}.{key}', key)} {as_text(value)}"
        for key, value in settings.items()
        if key not in (*_TOLD_BY_COUNTS, *told_elsewhere)
        and (key in always or key not in usual or usual[key] != value)
    ]


def _with(title: str, settings: Sequence[str]) -> str:
    return f"{title} ({', '.join(settings)})" if settings else title


@dataclass(frozen=True)
class Origin:
    """How one run was made."""

    run: str
    seed: str
    started: str
    command: str
    partition_hash: str
    state_sha256: str


@dataclass(frozen=True)
class Repetition:
    """How to repeat the runs of a setup."""

    label: str
    origins: tuple[Origin, ...]
    file: str
    commands: tuple[str, ...]
    experiment: str


def repetition_of(setup: Setup, label: str, number: int) -> Repetition:
    """Return how the runs of a setup, the ``number``-th of a report, were made."""
    file = f"experiment-{number}.yaml"
    seeds = [run.seed for run in setup.runs if run.seed is not None]
    experiment = setup.runs[0].experiment
    return Repetition(
        label=label,
        origins=tuple(_origin(run) for run in setup.runs),
        file=file,
        commands=tuple(
            f"knnper simulate {file} --set run.seed={seed} "
            f"--output runs/again-{number}-seed-{seed}"
            for seed in seeds
        ),
        experiment=dump_yaml(experiment) if experiment else "",
    )


def environments(runs: Sequence[Run]) -> list[str]:
    """Return with what the runs were made, each with how many of them."""
    counts = Counter(environment_text(run.manifest) for run in runs)
    if len(counts) == 1:
        return list(counts)
    return [f"{text} ({count} of the runs)" for text, count in counts.items()]


def _origin(run: Run) -> Origin:
    manifest = run.manifest
    return Origin(
        run=run.name,
        seed=_UNKNOWN if run.seed is None else str(run.seed),
        started=str(manifest.get("started", _UNKNOWN)),
        command=shlex.join(manifest.get("command", ())) or _UNKNOWN,
        partition_hash=str(manifest.get("partition_hash", _UNKNOWN)),
        state_sha256=str(run.results["training"].get("state_sha256", _UNKNOWN)),
    )


def environment_text(manifest: Mapping[str, Any]) -> str:
    """Return the versions and the machine of a manifest as a phrase."""
    versions = manifest.get("versions", {})
    packages = (f"{name} {version}" for name, version in versions.items() if version)
    machine = manifest.get("platform", _UNKNOWN)
    cores = manifest.get("num_cpus", "?")
    return f"{', '.join(packages) or _UNKNOWN}; {machine}; {cores} CPU cores"


FIGURES: Mapping[str, str] = {
    "average": "accuracy_weighted",
    "mean": "accuracy_mean",
    "bottom_decile": "accuracy_bottom_decile",
    "worst": "accuracy_worst",
    "fraction_degraded": "fraction_degraded",
    "ece": "ece",
    "log_loss": "log_loss",
}
"""What a row calls the figures of `knnper.server.results.Summary`."""

FEDAVG = METHODS["fedavg"].title

VS_FEDAVG = "fraction_degraded_vs_fedavg"


@dataclass(frozen=True)
class Row:
    """How one model did on one group of clients."""

    label: str  # no two rows of a group share one
    method: str
    setup: str
    group: str
    runs: tuple[str, ...]  # the names of the folders, one a seed
    model: str
    # By the names of `FIGURES`; ``gain`` is over the unpersonalised model of the same
    # run, `VS_FEDAVG` against the one FedAvg of the table over the same split.
    figures: Mapping[str, Estimate]
    num_clients: int  # of the first run, as the rounds
    num_rounds: int | None
    seconds: float | None  # training, and personalisation where there is one: mean
    is_reference: bool  # an unpersonalised model


_TELLING = ("accuracy_weighted", "accuracy_bottom_decile", "num_clients")


@dataclass(frozen=True)
class _Model:
    """By what a model is known: setups may share one, whatever they add to it."""

    title: str
    states: tuple[str | None, ...]  # of the server at the end, one a seed
    # These tell models apart whose states are not known, or that were tested on others.
    figures: tuple[tuple[object, ...], ...]


def table_of(setups: Sequence[Setup]) -> list[Row]:
    """Return the rows of a table that compares setups: seen clients, then unseen."""
    fedavg = _fedavg_of(setups)
    found = [
        one
        for group in GROUPS
        for setup in setups
        for one in _rows(setup, group, fedavg)
    ]
    shown = {(row.group, model) for model, row in found if not row.is_reference}
    table = []
    for model, row in found:
        if not row.is_reference or (row.group, model) not in shown:
            table.append((model, row))
            shown.add((row.group, model))
    labels = _reference_labels(found)
    return [
        replace(row, label=labels[model]) if row.is_reference else row
        for model, row in table
    ]


def table_of_run(run: Run) -> list[Row]:
    """Return the rows of one run."""
    return table_of(setups_of([run]))


def as_documents(rows: Iterable[Row], over: FederatedData) -> list[dict[str, Any]]:
    """Return the rows as plain values, fractions of 1; None is not known."""
    return [
        {
            "data": over.data,
            "partition": over.partition,
            "model": row.model,
            "label": row.label,
            "method": row.method,
            "setup": row.setup,
            "group": row.group,
            "runs": list(row.runs),
            **{
                key: value
                for name, one in row.figures.items()
                for key, value in one.flat(name).items()
            },
            "num_clients": row.num_clients,
            "num_rounds": row.num_rounds,
            "seconds": row.seconds,
            "is_reference": row.is_reference,
        }
        for row in rows
    ]


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
    header = ["method", "group", "average", "bottom decile", *degraded]
    header += ["clients", *(["seeds"] if several else []), "rounds", "seconds"]
    return [header, *(_cells(row, degraded.values(), several) for row in rows)]


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


def percent(figure: Estimate) -> str:
    """Return a fraction in percent with its interval, as in ``79.9 ± 1.2 %``."""
    if figure.mean is None:
        return "-"
    mean = f"{100 * figure.mean:.1f}"
    if figure.half_width is None:
        return f"{mean} %"
    return f"{mean} ± {100 * figure.half_width:.1f} %"


def points(figure: Estimate) -> str:
    """Return a fraction in percent, as `percent` does, without the sign."""
    return percent(figure).removesuffix(" %")


def number(figure: Estimate) -> str:
    """Return a figure with its interval, as in ``1.178 ± 0.020``."""
    if figure.mean is None:
        return "-"
    if figure.half_width is None:
        return f"{figure.mean:.3f}"
    return f"{figure.mean:.3f} ± {figure.half_width:.3f}"


def seconds_of(row: Row) -> str:
    """Return the seconds of a row as text."""
    return "-" if row.seconds is None else f"{row.seconds:.1f}"


def _reference_labels(found: Sequence[tuple[_Model, Row]]) -> dict[_Model, str]:
    """Return what unpersonalised models are called, in all groups of clients alike."""
    models: dict[str, set[_Model]] = defaultdict(set)
    for model, row in found:
        models[row.method].add(model)
    labels: dict[_Model, str] = {}
    for model, row in found:
        if row.is_reference:
            whose = f" of {row.setup}" if len(models[row.method]) > 1 else ""
            labels.setdefault(model, row.label + whose)
    return labels


_Fedavg = Mapping[int | None, tuple[str, Mapping[str, float]]]
"""By seed the split, and the clients' accuracies with FedAvg's model."""


def _fedavg_of(setups: Sequence[Setup]) -> _Fedavg:
    """Return FedAvg's model of a table; nothing where there is none, or several."""
    whole = [setup for setup in setups if setup.title == FEDAVG]
    if len(setups) < 2 or len(whole) > 1:
        return {}
    if whole:
        return _accuracies(whole[0], lambda one: one.accuracy)
    found = {
        _model(setup, FEDAVG, is_reference=True): setup
        for setup in setups
        if setup.runs[0].reference_title == FEDAVG
    }
    if len(found) != 1:
        return {}
    return _accuracies(next(iter(found.values())), lambda one: one.accuracy_global)


def _accuracies(setup: Setup, of: Callable[[ClientRow], float]) -> _Fedavg:
    return {
        run.seed: (
            str(run.manifest.get("partition_hash")),
            {one.client: of(one) for one in clients_of(run.path)},
        )
        for run in setup.runs
        if has_clients(run.path)
    }


def _vs_fedavg(
    run: Run, group: str, fedavg: _Fedavg, *, is_reference: bool
) -> float | None:
    split, accuracies = fedavg.get(run.seed, ("", {}))
    if split != str(run.manifest.get("partition_hash")) or not has_clients(run.path):
        return None
    clients = [one for one in clients_of(run.path) if one.seen == (group == "seen")]
    if is_reference:
        clients = [replace(one, accuracy=one.accuracy_global) for one in clients]
    return fraction_degraded_against(clients, accuracies)


def _rows(setup: Setup, group: str, fedavg: _Fedavg) -> Iterator[tuple[_Model, Row]]:
    personal = [run.figures(group) for run in setup.runs]
    reference = [one["global"] for one in personal]
    if personal[0]["num_clients"] == 0:
        return
    title = setup.runs[0].reference_title
    if title is not None and _differ(personal, reference):
        row = _row(setup, title, group, reference, fedavg, is_reference=True)
        yield _model(setup, title, is_reference=True), row
    row = _row(setup, setup.title, group, personal, fedavg, is_reference=False)
    yield _model(setup, setup.title, is_reference=False), row


def _differ(
    personal: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]
) -> bool:
    return any(
        {key: value for key, value in one.items() if key != "global"} != other
        for one, other in zip(personal, reference, strict=True)
    )


def _row(
    setup: Setup,
    method: str,
    group: str,
    figures: Sequence[Mapping[str, Any]],
    fedavg: _Fedavg,
    *,
    is_reference: bool,
) -> Row:
    vs_fedavg = estimate(
        _vs_fedavg(run, group, fedavg, is_reference=is_reference) for run in setup.runs
    )
    seconds = (_seconds(run, with_hand_over=not is_reference) for run in setup.runs)
    return Row(
        label=method if is_reference else setup.label,
        method=method,
        setup=setup.label,
        group=group,
        runs=tuple(run.name for run in setup.runs),
        model=model_of(setup.runs[0]),
        figures={
            **_figures(figures, is_compared=setup.has_reference),
            VS_FEDAVG: vs_fedavg,
        },
        num_clients=figures[0]["num_clients"],
        num_rounds=setup.runs[0].results["training"].get("num_rounds"),
        seconds=estimate(seconds).mean,
        is_reference=is_reference,
    )


def _model(setup: Setup, title: str, *, is_reference: bool) -> _Model:
    """Return what clients have at a setup's end, or the unpersonalised model of it."""
    results = [run.results[group] for group in GROUPS for run in setup.runs]
    found = [one["global"] for one in results] if is_reference else results
    return _Model(
        title,
        states=tuple(run.results["training"].get("state_sha256") for run in setup.runs),
        figures=tuple(tuple(one.get(name) for name in _TELLING) for one in found),
    )


def _figures(
    by_seed: Sequence[Mapping[str, Any]], *, is_compared: bool
) -> dict[str, Estimate]:
    """Return the figures of a row; without gain where there is no reference."""
    figures = {
        name: estimate(one.get(key) for one in by_seed) for name, key in FIGURES.items()
    }
    figures["gain"] = estimate(map(_gain, by_seed) if is_compared else ())
    return figures


def _gain(figures: Mapping[str, Any]) -> float | None:
    own, reference = (
        one.get(FIGURES["average"]) for one in (figures, figures.get("global", {}))
    )
    return None if own is None or reference is None else own - reference


def _seconds(run: Run, *, with_hand_over: bool) -> float | None:
    training = run.results["training"]
    seconds: float | None = training.get("seconds")
    if seconds is not None and with_hand_over:
        seconds += training.get("personalization_seconds", 0.0)
    return seconds


def _cells(row: Row, degraded: Iterable[str], several: bool) -> list[str]:
    return [
        row.label,
        row.group,
        percent(row.figures["average"]),
        percent(row.figures["bottom_decile"]),
        *(percent(row.figures[name]) for name in degraded),
        str(row.num_clients),
        *([str(len(row.runs))] if several else []),
        "-" if row.num_rounds is None else str(row.num_rounds),
        seconds_of(row),
    ]


RESULT_FILES = ("results.json", "rounds.jsonl", "failed.txt", "parts.jsonl")
"""One of them is there, or grows, as soon as a run, a round or a part is done."""
