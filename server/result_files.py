"""Validate ``results.json`` and ``rounds.jsonl`` before they are used.

A run's folder may be damaged, edited or copied from another machine. Its files are
validated, so that a wrong value is an error with file and place, and not an exception
in the middle of a report. Unknown keys are allowed, since other versions may write
them.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from knnper.settings import LARGEST_COUNT, shown

_LARGEST_NUMBER = 1e100  # as `LARGEST_LOSS`; beyond it sums and charts may overflow
Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Number = Annotated[float, Field(ge=-_LARGEST_NUMBER, le=_LARGEST_NUMBER)]


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


_RESULTS, _ROUND = TypeAdapter(_ResultsForm), TypeAdapter(_RoundForm)


def results_problem(document: Mapping[str, Any]) -> str | None:
    """Describe the first invalid value of a ``results.json``; None if it is valid."""
    return _problem(_RESULTS, document)


def round_problem(record: Mapping[str, Any]) -> str | None:
    """Describe the first invalid value of a round's record; None if it is valid."""
    return _problem(_ROUND, record)


def _problem(form: TypeAdapter[Any], document: Mapping[str, Any]) -> str | None:
    try:
        form.validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg']}, found {shown(first['input'])}"
    return None
