"""What a server asks of a client and what it gets back, as Flower messages."""

import contextlib
import dataclasses
import functools
import math
import platform
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from knnper.config.errors import CodecError, RunError
from knnper.transport.array_vector import vector_of
from knnper.transport.codec import Flat, flatten, unflatten
from knnper.transport.rebuilding import plain_fields
from knnper.transport.shared_memory import (
    is_vector_file,
    read_vector,
    recycle,
    write_vector,
)

R = TypeVar("R")

_VECTOR = "vector"
_FILE = "file"
_LAYOUT = "layout"

_CANNOT_PLAY = "no client can be played"


class CarrierError(CodecError):
    """A message names a file that this machine does not have."""


class CannotPlayError(RunError):
    """A process cannot play any client: its set-up is wrong, not a client's data.

    Of an error that a client raises, Flower hands on only the text. So the text says
    it, and `why_none_can_be_played` finds it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"{_CANNOT_PLAY} on {platform.node()}: {reason}")


def why_none_can_be_played(failure: str) -> str | None:
    """Return the message of the `CannotPlayError` in a failure's text; None without."""
    if _CANNOT_PLAY not in failure:
        return None
    # What stands around it is Ray's traceback and Flower's quotes.
    reason = failure.rpartition(_CANNOT_PLAY)[2].splitlines()[0]
    return _CANNOT_PLAY + reason.removesuffix("'>")


class Purpose(StrEnum):
    """What a client is asked to do; the values are Flower message types."""

    TRAIN = "train"
    VALIDATE = "evaluate.validate"
    PERSONALIZE = "evaluate.personalize"
    INTRODUCE = "query"
    REFUSE = "query.refuse"

    @property
    def action(self) -> str:
        """The name under which a ClientApp registers what is done."""
        return self.value.partition(".")[2]


@dataclass(frozen=True)
class Job:
    """Everything about a request that is not the payload.

    Attributes
    ----------
    clients
        Their names; one for `Purpose.TRAIN`.
    server_round
        From 1; for a request outside of training, the rounds that were made.
    keep_rounds
        Those to which the server may still go back. Of the client states up to the
        latest of them, others than the newest at each of them may go.
    state_rounds
        For each client, the round that ended with the state from which it goes on; 0
        is from the start. Empty where no state is needed.
    experiment
        The experiment as JSON: the clients learn it from the server.
    run_folder
        Where clients without a state folder of their own keep their state; empty if
        they have one.
    shared_folder
        Where replies may be left as files in memory; empty if they travel in the
        message.
    session
        What the server wrote to the run's folder, so that clients know that it is the
        same one; empty if there is nothing to compare.
    timeout_s
        When the server stops waiting; 0 if it does not.
    model
        Fingerprint of the global model that is handed over, where the method ends with
        one.
    seen
        Whether the clients may have taken part in training.
    """

    clients: list[str]
    server_round: int
    keep_rounds: list[int]
    experiment: str
    run_folder: str = ""
    shared_folder: str = ""
    session: str = ""
    timeout_s: float = 0.0
    model: str = ""
    seen: bool = True
    state_rounds: list[int] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class Packed:
    """A record ready to be put into any number of messages.

    Attributes
    ----------
    array, entry
        Its numbers, if they are not in a file, and what else there is to know.
    num_bytes
        Size of the numbers, where it was packed here.
    """

    array: ArrayRecord
    entry: ConfigRecord
    num_bytes: int = 0


def pack(record: object, shared_folder: Path | None) -> Packed:
    """Return ``record`` in the form in which it travels.

    Parameters
    ----------
    record
        A frozen dataclass that the codec takes.
    shared_folder
        If not None, the numbers go into a file there and the message only names it;
        where there is no room left they stay in the message.
    """
    flat = flatten(record)
    entry = ConfigRecord({_LAYOUT: flat.layout})
    if shared_folder is not None and flat.vector.numel():
        path = write_vector(shared_folder, flat.vector)
        if path is not None:
            entry[_FILE] = str(path)
            return Packed(ArrayRecord(), entry, flat.vector.nbytes)
    array = ArrayRecord({_VECTOR: Array(flat.vector.numpy())})
    return Packed(array, entry, flat.vector.nbytes)


def unpack(
    record_type: type[R],
    packed: Packed,
    folder: Path | None = None,
    most_bytes: float = math.inf,
) -> R:
    """Return the record that was packed.

    Parameters
    ----------
    record_type
        What it must be.
    packed
        As it arrived: any of it may be wrong.
    folder
        The only one in which its numbers may be a file; None where none may be.
    most_bytes
        Its numbers may have.

    Raises
    ------
    CarrierError
        If its numbers are in a file that is not on this machine.
    CodecError
        If the message does not hold one, or names a file that it may not name.
    """
    file, layout = _file(packed, folder), _layout(packed)
    if file is not None:
        return _read(record_type, file, layout, most_bytes)
    vector = vector_of(packed.array.get(_VECTOR), most_bytes)
    return unflatten(record_type, Flat(vector, layout))


def unpack_shared(
    record_type: type[R], packed: Packed, folder: Path | None = None
) -> R:
    """Return the record that was packed, the same object for the same file.

    For what many messages in a row hold, as a round's model. Nobody may change it.

    Raises
    ------
    CarrierError, CodecError
        As `unpack`.
    """
    file = _file(packed, folder)
    if file is None:
        return unpack(record_type, packed)
    record = _read_once(cast(Hashable, record_type), file, _layout(packed))
    return cast(R, record)


def discard(packed: Packed, folder: Path | None) -> None:
    """Give back the file in ``folder`` that ``packed`` names, if it names one.

    No other file is touched, whatever it names.
    """
    with contextlib.suppress(CodecError):
        file = _file(packed, folder)
        if file is not None:
            recycle(file)


def to_content(job: Job | None, packed: dict[str, Packed]) -> RecordDict:
    """Return a message's content: the job and any number of packed records by name."""
    content = RecordDict()
    if job is not None:
        content["job"] = ConfigRecord(dataclasses.asdict(job))
    for name, one in packed.items():
        content[f"{name}.array"] = one.array
        content[f"{name}.entry"] = one.entry
    return content


def has_job(content: RecordDict) -> bool:
    """Return whether a request says what job it is for."""
    return "job" in content.config_records


def job_of(content: RecordDict) -> Job:
    """Return the job of a request.

    Raises
    ------
    CodecError
        If it has none, or of other fields.
    """
    job = plain_fields(Job, content.config_records.get("job"))
    if not 0 <= job.timeout_s < math.inf:
        raise CodecError(f"expected a time to work, found {job.timeout_s} s")
    return job


def packed_of(content: RecordDict, name: str) -> Packed | None:
    """Return the packed record called ``name``, or None if there is none.

    Raises
    ------
    CodecError
        If there is half of one.
    """
    array, entry = content.get(f"{name}.array"), content.get(f"{name}.entry")
    if array is None and entry is None:
        return None
    if not isinstance(array, ArrayRecord) or not isinstance(entry, ConfigRecord):
        raise CodecError(f"expected the array and the entry of a {name}")
    return Packed(array, entry)


def _file(packed: Packed, folder: Path | None) -> Path | None:
    """Return the file that holds the numbers; its name is never used again."""
    named = packed.entry.get(_FILE)
    if named is None:
        return None
    if folder is None or not is_vector_file(Path(str(named)), folder):
        where = folder or "no folder"
        raise CodecError(
            f"a message names the file {named!r}, and may name one in {where} only: "
            "set run.carrier to message"
        )
    return Path(str(named))


def _layout(packed: Packed) -> str:
    layout = packed.entry.get(_LAYOUT)
    if not isinstance(layout, str):
        raise CodecError(f"expected a layout as text, found {type(layout).__name__}")
    return layout


def _read(
    record_type: type[R], file: Path, layout: str, most_bytes: float = math.inf
) -> R:
    try:
        num_bytes = file.stat().st_size
    except FileNotFoundError as error:
        raise CarrierError(
            f"{file} is not on this machine: set run.carrier to message"
        ) from error
    if num_bytes > most_bytes:
        raise CodecError(f"expected at most {most_bytes:g} bytes, found {num_bytes}")
    return unflatten(record_type, Flat(read_vector(file), layout))


# A payload and a reference, which may differ.
@functools.lru_cache(maxsize=2)
def _read_once(record_type: Any, file: Path, layout: str) -> object:
    return _read(record_type, file, layout)
