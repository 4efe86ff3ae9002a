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
from knnper.models import MODELS
from knnper.settings import dotted
from knnper.simulation.origin import read_inputs
from knnper.simulation.partition.schemes import PARTITIONS
from knnper.simulation.reports.finished_run import GROUPS, UNKNOWN, FinishedRun
from knnper.simulation.reports.setups import Setup
from knnper.simulation.reports.text import TERMS, as_text
from knnper.yaml_text import dump_yaml

FINGERPRINT = 12  # digits shown of a fingerprint
# Settings of a partition that the numbers of seen and unseen clients replace.
_SHOWN_AS_COUNTS = ("num_clients", "unseen_fraction")
# Partitions that differ in this setting have the same clients and test data.
_TREATMENT = "unseen_train_fraction"


@dataclass(frozen=True)
class FederatedData:
    """A data set and its partition over clients, in words."""

    data: str
    partition: str

    @property
    def title(self) -> str:
        """Both in one line."""
        return f"{self.data}; {self.partition}"


def facts_of(over: FederatedData, setups: Sequence[Setup]) -> dict[str, str]:
    """Return the facts at the top of a report, by name."""
    runs = [run for setup in setups for run in setup.runs]
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    models: dict[str, list[str]] = {}
    for setup in setups:
        models.setdefault(model_of(setup.runs[0]), []).append(setup.label)
    descriptions = [
        model if len(models) == 1 else f"{model} ({', '.join(labels)})"
        for model, labels in models.items()
    ]
    return {
        "data set": over.data,
        "partition": over.partition,
        "model": "; ".join(descriptions),
        "seed" if len(seeds) == 1 else "seeds": ", ".join(map(str, seeds)) or UNKNOWN,
    }


def by_data(
    runs: Sequence[FinishedRun],
) -> list[tuple[FederatedData, list[FinishedRun]]]:
    """Group runs by data set and partition, in the order of each group's first run.

    Data sets are the same if their content is; where that is unknown, as for
    ``flwr run``, the settings decide.
    """
    groups: list[list[FinishedRun]] = []
    for run in runs:
        group = next((group for group in groups if _belongs_to(run, group)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    described = [_describe_data(group) for group in groups]
    return [
        (over if described.count(over) == 1 else _with_content(over, group), group)
        for over, group in zip(described, groups, strict=True)
    ]


def model_of(run: FinishedRun) -> str:
    """Return the title of a run's model with its settings."""
    return _describe_section(run, "model", MODELS)


def _belongs_to(run: FinishedRun, group: Sequence[FinishedRun]) -> bool:
    """Return whether a run has the data and partition of a group of runs."""
    has_same_data = False
    for other in group:
        own_partition, other_partition = (
            {**of_run.section("partition"), _TREATMENT: None} for of_run in (run, other)
        )
        contents = {_content_fingerprint(run), _content_fingerprint(other)}
        is_known = "" not in contents
        if own_partition != other_partition or (is_known and len(contents) > 1):
            return False
        same_settings = run.section("data") == other.section("data")
        has_same_data = has_same_data or is_known or same_settings
    return has_same_data


def _content_fingerprint(run: FinishedRun) -> str:
    """Return the fingerprint of a run's data; empty if unknown."""
    inputs = read_inputs(run.path)
    return "" if inputs is None else inputs.data


def _describe_data(runs: Sequence[FinishedRun]) -> FederatedData:
    run = runs[0]
    treatments = {as_text(of.section("partition").get(_TREATMENT)) for of in runs}
    left_out = (_TREATMENT,) if len(treatments) > 1 else ()  # the labels have it
    counts = ((group, run.results[group]["num_clients"]) for group in GROUPS)
    clients = " and ".join(f"{count} {group}" for group, count in counts if count)
    return FederatedData(
        _describe_section(run, "data", DATA_SETS),
        _describe_section(
            run,
            "partition",
            PARTITIONS,
            left_out=left_out,
            extra=[f"{clients} clients"] if clients else [],
        ),
    )


def _with_content(over: FederatedData, runs: Sequence[FinishedRun]) -> FederatedData:
    """Add the fingerprint or else the path that distinguishes equally named data."""
    content = next(filter(None, map(_content_fingerprint, runs)), "")
    suffix = f"content {content[:FINGERPRINT]}" if content else f"of {runs[0].path}"
    return replace(over, data=f"{over.data}, {suffix}")


def _describe_section(
    run: FinishedRun,
    section: str,
    specs: Mapping[str, Any],
    *,
    left_out: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> str:
    """Return the title of a section's choice, with the settings that are not defaults.

    Of a partition, its own settings are shown even if they are defaults.
    """
    settings = run.section(section)
    title = name = str(settings.pop("name", UNKNOWN))
    shown = list[str]()
    if name in specs:
        title = specs[name].title
        settings_type = specs[name].settings_type
        is_partition = section == "partition"
        always = inspect.get_annotations(settings_type) if is_partition else {}
        defaults = {
            field.name: to_jsonable_python(field.default)
            for field in dataclasses.fields(settings_type)
            if field.default is not dataclasses.MISSING
        }
        default_of = dict(dotted(defaults))
        shown = [
            f"{TERMS.get(f'{section}.{key}', key)} {as_text(value)}"
            for key, value in settings.items()
            if key not in (*_SHOWN_AS_COUNTS, *left_out)
            and (key in always or key not in default_of or default_of[key] != value)
        ]
    shown += extra
    return f"{title} ({', '.join(shown)})" if shown else title


def repetition_of(setup: Setup, label: str, number: int) -> Mapping[str, Any]:
    """Return how to repeat the runs of a setup, the ``number``-th of a report."""
    file = f"experiment-{number}.yaml"
    experiment = setup.runs[0].experiment
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
        "origins": list(map(_origin_of, setup.runs)),
    }


def _origin_of(run: FinishedRun) -> dict[str, str]:
    return {
        "run": run.name,
        "seed": UNKNOWN if run.seed is None else str(run.seed),
        "started": str(run.manifest.get("started", UNKNOWN)),
        "command": shlex.join(run.manifest.get("command", ())) or UNKNOWN,
        "partition_hash": run.split_hash,
        "state_sha256": str(run.results["training"].get("state_sha256", UNKNOWN)),
    }


def environments(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the versions and machines of the runs, each with its number of runs."""
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
