"""The files of a run's results: write ``clients.csv``; validate the others on reading.

A run's folder may be damaged, edited or copied from another machine. ``results.json``
and ``rounds.jsonl`` are validated, so that a wrong value is an error with file and
place, and not an exception in the middle of a report. Unknown keys are allowed, since
other versions may write them.
"""

import codecs
import csv
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from knnper.files import written_atomically
from knnper.metrics import ACCURACY
from knnper.server.results import metric_of
from knnper.settings import LARGEST_COUNT, shown
from knnper.strategies.core.evaluation import ClientResult

# Former names of keys in result files, which are still read.
EARLIER_NAMES = {
    "fraction_hurt": "fraction_degraded",
    "hand_over": "model_distribution",
    "away": "offline",
}

_COLUMNS = ("client", "seen", "num_train", "num_validation", "num_test")
_LARGEST_NUMBER = 1e100  # as `LARGEST_LOSS`; beyond it sums and charts may overflow

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Number = Annotated[float, Field(ge=-_LARGEST_NUMBER, le=_LARGEST_NUMBER)]


def write_clients_csv(
    path: Path,
    results: Iterable[ClientResult],
    metrics: Sequence[str] = (),
    columns_of_clients: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> None:
    """Write one row a client; equal results give equal bytes.

    Parameters
    ----------
    results
        Sorted by name; iterated twice.
    columns_of_clients
        Further columns, by client.
    """
    measured = list(dict.fromkeys([ACCURACY, "log_loss", *metrics]))
    columns = [
        *_COLUMNS,
        *(column for result in measured for column in columns_of(result)),
    ]
    chosen = {
        key
        for result in results
        for key in itertools.chain(
            result.chosen, columns_of_clients.get(result.client, ())
        )
    }
    header = [*columns, *sorted(chosen.difference(columns))]
    with written_atomically(path) as file:
        text = codecs.getwriter("utf-8")(file)
        writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {**_row(result, measured), **columns_of_clients.get(result.client, {})}
            for result in results
        )


def columns_of(metric: str) -> tuple[str, str]:
    """Return the columns of a metric: of the client's own and the global model."""
    return metric, f"{metric}_global"


def _row(result: ClientResult, metrics: Sequence[str]) -> dict[str, str]:
    models = result.personal, result.reference
    figures = {
        column: metric_of(model, metric)
        for metric in metrics
        for column, model in zip(columns_of(metric), models, strict=True)
    }
    return {
        **{name: repr(float(value)) for name, value in result.chosen.items()},
        "client": result.client,
        "seen": str(result.seen).lower(),
        "num_train": str(result.num_train),
        "num_validation": str(result.num_validation),
        "num_test": str(result.personal.num_examples),
        **{
            name: "" if value is None else repr(value)
            for name, value in figures.items()
        },
    }


def with_present_names(results: dict[str, Any]) -> dict[str, Any]:
    """Replace former names in the content of a ``results.json``."""
    groups = [results.get(name, {}) for name in ("seen", "unseen")]
    figures = [group.get("global", {}) for group in groups]
    for part in (*groups, *figures, results.get("hand_over", {}), results):
        for name in EARLIER_NAMES.keys() & part.keys():
            part[EARLIER_NAMES[name]] = part.pop(name)
    return results


class _DocumentForm(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _FiguresForm(_DocumentForm):
    __pydantic_extra__: dict[str, Number | None]
    num_clients: Count


class _GroupForm(_FiguresForm):
    reference: _FiguresForm | None = Field(default=None, alias="global")


class _ValidationForm(_DocumentForm):
    __pydantic_extra__: dict[str, Number | None]


class _LeftOutForm(_DocumentForm):
    client: str
    after_round: Count
    cosine: Number


class _TrainingForm(_DocumentForm):
    __pydantic_extra__: dict[str, Number | None]
    num_rounds: Count | None = None
    personalization_seconds: Number = 0.0
    state_sha256: str = ""
    validation: _ValidationForm | None = None
    left_out: list[_LeftOutForm] = []
    privacy: dict[str, Any] = {}
    example_privacy: dict[str, Any] = {}


class _DistributionForm(_DocumentForm):
    withheld: list[str] = []
    offline: list[str] = []


class _MetricForm(_DocumentForm):
    name: str


class _RunForm(_DocumentForm):
    seed: Count | None = None
    metrics: list[_MetricForm] = []


class _ExperimentForm(_DocumentForm):
    run: _RunForm | None = None


class _ManifestForm(_DocumentForm):
    command: list[str] = []
    started: str = ""
    partition_hash: str = ""
    results_identity: str = ""
    versions: dict[str, str | None] = {}
    platform: str = ""
    num_cpus: Count | None = None
    experiment: _ExperimentForm | None = None


class _ResultsForm(_DocumentForm):
    method: str = ""
    personalization: str = ""
    title: str = ""
    seen: _GroupForm | None = None
    unseen: _GroupForm | None = None
    training: _TrainingForm | None = None
    model_distribution: _DistributionForm | None = None
    manifest: _ManifestForm | None = None


class _RoundForm(_DocumentForm):
    __pydantic_extra__: dict[str, Number | None]
    server_round: Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
    failures: dict[str, str] = {}
    participants: dict[str, int] = {}
    clipped: dict[str, Number] = {}
    left_out: list[str] = []


def results_problem(document: Mapping[str, Any]) -> str | None:
    """Describe the first invalid value of a ``results.json``; None if it is valid."""
    return _problem(_ResultsForm, document)


def round_problem(record: Mapping[str, Any]) -> str | None:
    """Describe the first invalid value of a round's record; None if it is valid."""
    return _problem(_RoundForm, record)


def _problem(form: type[BaseModel], document: Mapping[str, Any]) -> str | None:
    try:
        form.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg']}, found {shown(first['input'])}"
    return None
