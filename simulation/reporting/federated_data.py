"""What runs are over: a data set and its partition; the others do not compare."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic_core import to_jsonable_python

from knnper.config.sections import Settings
from knnper.data.catalogue import DATA_SETS
from knnper.models.catalogue import MODELS
from simulation.batch.inputs import read_inputs
from simulation.partition.catalogue import PARTITIONS
from simulation.reporting.runs import GROUPS, Run
from simulation.reporting.setups import Setup, as_text
from simulation.sweep.terms import TERMS

_UNKNOWN = "not known"
_TOLD_BY_COUNTS = ("num_clients", "unseen_fraction")
_TREATMENT = "unseen_train_fraction"
"""Of a partition; with another one the same clients are tested on the same data."""

_FINGERPRINT = 12  # digits


@dataclass(frozen=True)
class FederatedData:
    """A data set and its partition over clients.

    Attributes
    ----------
    data, partition
        In words, with the settings that tell them apart.
    """

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
    """Return the runs over each data set and partition, in the order of the first.

    The data of two runs are the same if their content is. Where a run does not tell
    the content's fingerprint, as those of ``flwr run``, its settings decide.
    """
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


class _Spec(Protocol):
    """An entry of any of the catalogues."""

    @property
    def title(self) -> str: ...

    @property
    def settings_type(self) -> type[Settings]: ...


def _told(
    run: Run,
    section: str,
    specs: Mapping[str, _Spec],
    told_elsewhere: Sequence[str] = (),
) -> tuple[str, list[str]]:
    """Return the title of what a section names, and its settings in words.

    These are what differs from the default; and of a partition all that it does not
    share with the others, such as α.
    """
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
