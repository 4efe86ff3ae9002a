"""The data, model, commands and machines behind the runs of a report."""

import dataclasses
import inspect
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import to_jsonable_python

from knnper.data.catalogue import DATA_SETS
from knnper.experiment import dotted, dump_yaml
from knnper.models import MODELS
from knnper.simulation.origin import read_inputs
from knnper.simulation.partition.schemes import PARTITIONS
from knnper.simulation.reports.finished_run import (
    GROUPS,
    UNKNOWN,
    FinishedRun,
)
from knnper.simulation.reports.setups import Setup
from knnper.simulation.reports.terms import TERMS
from knnper.simulation.reports.text import as_text

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


def by_data(
    runs: Sequence[FinishedRun],
) -> list[tuple[FederatedData, list[FinishedRun]]]:
    """Return the runs over each data set and partition, in the order of the first."""
    # The data are the same if their content is; where that is not known, as of
    # ``flwr run``, the settings decide.
    groups: list[list[FinishedRun]] = []
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


def model_of(run: FinishedRun) -> str:
    """Return the name of what a run trains, with its settings."""
    return _told(run, "model", MODELS)


def _is_over(run: FinishedRun, group: Sequence[FinishedRun]) -> bool:
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


def _content(run: FinishedRun) -> str:
    """Return the fingerprint of the data of a run; empty is not known."""
    inputs = read_inputs(run.path)
    return "" if inputs is None else inputs.data


def _federated_data(runs: Sequence[FinishedRun]) -> FederatedData:
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


def _with_content(over: FederatedData, runs: Sequence[FinishedRun]) -> FederatedData:
    """Return it with what alone tells it from another: a fingerprint, or its place."""
    content = next(filter(None, map(_content, runs)), "")
    what = f"content {content[:FINGERPRINT]}" if content else f"of {runs[0].path}"
    return replace(over, data=f"{over.data}, {what}")


def _told(
    run: FinishedRun,
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


def _origin(run: FinishedRun) -> dict[str, str]:
    return {
        "run": run.name,
        "seed": UNKNOWN if run.seed is None else str(run.seed),
        "started": str(run.manifest.get("started", UNKNOWN)),
        "command": shlex.join(run.manifest.get("command", ())) or UNKNOWN,
        "partition_hash": run.split_hash,
        "state_sha256": str(run.results["training"].get("state_sha256", UNKNOWN)),
    }


def environments(runs: Sequence[FinishedRun]) -> list[str]:
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
