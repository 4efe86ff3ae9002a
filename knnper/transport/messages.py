"""Requests of a server and replies of a client, as Flower messages."""

import contextlib
import dataclasses
import functools
import math
import platform
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from knnper.errors import CodecError, RunError, printable
from knnper.records import Flat, flatten, plain_fields, unflatten
from knnper.settings import LARGEST_COUNT, is_name
from knnper.transport.shared_memory import (
    is_vector_file,
    read_vector,
    recycle,
    write_vector,
)

R = TypeVar("R")

# Names of a message's records and of their entries.
VECTOR = "vector"
_INTRODUCTION = "introduction"
_FILE = "file"
_LAYOUT, _NUMBERS, _LENGTHS = "layout", "numbers", "lengths"
# In a reply to a task: the reasons of failures by the number of the client, and the
# name of the replies that are sent as one record.
FAILURES = "failures"
TOGETHER = "together"

# Bytes; a smaller vector is faster in a message than in a file of its own.
LEAST_IN_FILE = 1 << 17

_NUMPY = "numpy.ndarray"  # Flower's name of the format of `np.save`
# https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, version 1.0;
# NumPy's own reader allocates the size in the header before it reads the data.
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '<f4', 'fortran_order': (?:False|True), "
    rb"'shape': \((?P<length>\d{1,15}),\), \} *\n",
    re.DOTALL,
)
_MOST_HEADER_BYTES = 4096
_LONGEST_NAME = 255  # of a client
_CANNOT_RUN = "no client can be run"
_END_OF_LINE = " ⏎ "  # Flower passes failures on as one line of text


def too_large(most_bytes: float, size: int) -> CodecError:
    """Return the error of a peer that sent too many bytes."""
    return CodecError(f"expected at most {most_bytes:g} bytes, found {size}")


def vector_of(array: Array | None, most_bytes: float = math.inf) -> Tensor:
    """Return the float32 vector in an array from a peer; shape (d,)."""
    # No memory is allocated for numbers that did not arrive.
    if array is None:
        raise CodecError("expected an array of numbers, found none")
    if array.dtype != "float32" or array.stype != _NUMPY or len(array.shape) != 1:
        raise CodecError(
            f"expected a float32 vector as {_NUMPY}, found {array.dtype} of "
            f"{len(array.shape)} axes as {array.stype}"
        )
    if len(array.data) > most_bytes + _MOST_HEADER_BYTES:
        raise too_large(most_bytes, len(array.data))
    numbers = _numbers(array.data)
    if (len(numbers),) != tuple(array.shape):
        raise CodecError(f"expected {array.shape[0]} numbers, found {len(numbers)}")
    return copied(numbers)


def copied(numbers: NDArray[np.float32]) -> Tensor:
    """Return a float32 vector in memory as torch allocates it, on which bits depend."""
    vector = torch.empty(len(numbers))
    vector.numpy()[:] = numbers
    return vector


def _numbers(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return a view of the numbers in an NPY file of a float32 vector."""
    header = _NPY_HEADER.match(data)
    if header is None:
        raise CodecError("expected a float32 vector as NumPy saves it")
    num_bytes, expected = len(data) - header.end(), 4 * int(header["length"])
    if num_bytes != expected:
        raise CodecError(f"expected numbers in {expected} bytes, found {num_bytes}")
    return np.frombuffer(data, np.dtype("<f4"), offset=header.end())


@dataclass(frozen=True)
class Introduction:
    """A client's name and the sizes of its splits; nothing else leaves it."""

    name: str
    train: bool = True
    num_train: int = 0
    num_validation: int = 0
    num_test: int = 0
    problem: str = ""  # why it cannot take part, for the server's operators
    remark: str = ""  # why it takes part otherwise than they may expect


def introduction_content(introduction: Introduction) -> RecordDict:
    """Return the content of a message with which a client introduces itself."""
    return RecordDict({_INTRODUCTION: ConfigRecord(dataclasses.asdict(introduction))})


def read_introduction(content: RecordDict) -> Introduction:
    """Validate a client's introduction, which may be hostile."""
    record = content.config_records.get(_INTRODUCTION)
    if record is None:
        return Introduction("", problem="it sent no introduction: another version?")
    try:
        introduction = plain_fields(Introduction, record)
        if len(introduction.name) > _LONGEST_NAME or not is_name(introduction.name):
            expected = "expected a name of letters, digits, '.', '_' and '-'"
            raise CodecError(f"{expected}, found {introduction.name!r}")
        for count in (
            introduction.num_train,
            introduction.num_validation,
            introduction.num_test,
        ):
            if not 0 <= count <= LARGEST_COUNT:
                raise CodecError(f"expected a number of examples, found {count}")
    except CodecError as error:
        return Introduction("", problem=printable(str(error)))
    problem, remark = printable(introduction.problem), printable(introduction.remark)
    return dataclasses.replace(introduction, problem=problem, remark=remark)


class CarrierError(CodecError):
    """A message names a file that this machine does not have."""


class CannotRunError(RunError):
    """A process cannot run any client: its set-up is wrong, not a client's data."""

    # Flower passes on only the text, in which `why_none_can_run` finds this one.

    def __init__(self, reason: str) -> None:
        message = f"{_CANNOT_RUN} on {platform.node()}: {reason}"
        super().__init__(message.replace("\n", _END_OF_LINE))


def why_none_can_run(failure: str) -> str | None:
    """Return the message of the `CannotRunError` in a failure's text; None without."""
    if _CANNOT_RUN not in failure:
        return None
    # Ray's traceback and Flower's quotes surround it.
    reason = failure.rpartition(_CANNOT_RUN)[2].splitlines()[0]
    return (_CANNOT_RUN + reason.removesuffix("'>")).replace(_END_OF_LINE, "\n")


class Purpose(StrEnum):
    """Request to a client; the values are Flower message types."""

    TRAIN = "train"
    VALIDATE = "evaluate.validate"
    PERSONALIZE = "evaluate.personalize"
    INTRODUCE = "query"
    REFUSE = "query.refuse"
    SECURE = "query.secure"  # a stage of secure aggregation without the update

    @property
    def action(self) -> str:
        """The name under which a ClientApp registers its function."""
        return self.value.partition(".")[2]


@dataclass(frozen=True)
class Job:
    """Everything about a request that is not the payload."""

    clients: list[str]
    server_round: int
    keep_rounds: list[int]
    experiment: str
    run_folder: str = ""
    shared_folder: str = ""  # the name of a `Carrier`
    session: str = ""
    timeout_s: float = 0.0
    model: str = ""
    seen: bool = True
    state_rounds: list[int] = dataclasses.field(default_factory=list)
    counted_round: int = 0  # in which an update counts, if later; it names the state


@dataclass(frozen=True)
class Packed:
    """A record ready to be sent in any number of messages."""

    array: ArrayRecord
    entry: ConfigRecord
    num_bytes: int = 0


class Carrier:
    """Transport of the numbers of records: in the base class, inside the message.

    Attributes
    ----------
    name
        Name in a `Job`.
    """

    name: str = ""

    def put(self, vector: Tensor, entry: ConfigRecord) -> ArrayRecord:  # noqa: ARG002
        """Store a float32 vector; return its array for a message with ``entry``."""
        return ArrayRecord({VECTOR: Array(vector.numpy())})

    def place(self, packed: Packed) -> Hashable | None:
        """Return the place of numbers that messages share; None if inside one."""
        named = packed.entry.get(_FILE)
        if named is not None:
            raise _foreign(named, "no folder")
        return None

    def get(self, packed: Packed, most_bytes: float = math.inf) -> Tensor:
        """Return a float32 vector that was put; shape (d,)."""
        self.place(packed)
        return vector_of(packed.array.get(VECTOR), most_bytes)

    def discard(self, packed: Packed) -> None:
        """Free the memory of numbers that no process reads any more."""


IN_MESSAGE = Carrier()


class Files(Carrier):
    """Numbers as files in a folder in memory; in the message without room for them."""

    def __init__(self, folder: Path, least_bytes: int = LEAST_IN_FILE) -> None:
        self.folder, self.name = folder, str(folder)
        self._least_bytes = least_bytes

    @override
    def put(self, vector: Tensor, entry: ConfigRecord) -> ArrayRecord:
        is_small = vector.nbytes < self._least_bytes
        path = None if is_small else write_vector(self.folder, vector)
        if path is None:
            return super().put(vector, entry)
        entry[_FILE] = str(path)
        return ArrayRecord()

    @override
    def place(self, packed: Packed) -> Path | None:
        """Return the file that holds the numbers; its name is never used again."""
        named = packed.entry.get(_FILE)
        if named is None:
            return None
        path = Path(str(named))
        if not is_vector_file(path, self.folder):
            raise _foreign(named, self.folder)
        return path

    @override
    def get(self, packed: Packed, most_bytes: float = math.inf) -> Tensor:
        file = self.place(packed)
        if file is None:
            return super().get(packed, most_bytes)
        try:
            size = file.stat().st_size
        except FileNotFoundError as error:
            raise CarrierError(
                f"{file} is not on this machine: set run.carrier to message"
            ) from error
        if size > most_bytes:
            raise too_large(most_bytes, size)
        return read_vector(file)

    @override
    def discard(self, packed: Packed) -> None:
        """Give back the file that ``packed`` names, if it names one."""
        with contextlib.suppress(CodecError):
            file = self.place(packed)
            if file is not None:
                recycle(file)


def _foreign(named: object, where: object) -> CodecError:
    return CodecError(
        f"a message names the file {named!r}, and may name one in {where} only: "
        "set run.carrier to message"
    )


def pack(record: object, carrier: Carrier = IN_MESSAGE) -> Packed:
    """Pack a record, to be sent in any number of messages."""
    return pack_flat(flatten(record), carrier)


def pack_flat(flat: Flat, carrier: Carrier) -> Packed:
    """Pack a flattened record."""
    return _packed(flat.vector, ConfigRecord({_LAYOUT: flat.layout}), carrier)


def _packed(vector: Tensor, entry: ConfigRecord, carrier: Carrier) -> Packed:
    way = carrier if vector.numel() else IN_MESSAGE
    return Packed(way.put(vector, entry), entry, vector.nbytes)


def pack_together(flats: Mapping[int, Flat], carrier: Carrier) -> Packed:
    """Pack small records, by number, into one: faster than separate messages."""
    vectors = [flat.vector for flat in flats.values()]
    entry = ConfigRecord(
        {
            _LAYOUT: [flat.layout for flat in flats.values()],
            _NUMBERS: list(flats),
            _LENGTHS: [len(flat) for flat in vectors],
        }
    )
    return _packed(torch.cat(vectors), entry, carrier)


def unpack_together(
    packed: Packed, carrier: Carrier, most_bytes: float = math.inf
) -> dict[int, Flat]:
    """Unpack the records of `pack_together`, by number."""
    names = (_LAYOUT, _NUMBERS, _LENGTHS)
    layouts, numbers, lengths = (_list(packed, name) for name in names)
    vector = carrier.get(packed, most_bytes)
    places = [number for number in numbers if isinstance(number, int)]
    sizes = [length for length in lengths if isinstance(length, int) and length >= 0]
    if not len(layouts) == len(places) == len(sizes) or sum(sizes) != len(vector):
        raise CodecError(
            f"expected numbers and lengths of {len(layouts)} records, together "
            f"{len(vector)}, found {numbers} and {lengths}"
        )
    # Copied to memory as torch allocates it, on which bits depend.
    pieces = [piece.clone() for piece in torch.split(vector, sizes)]
    return {
        place: Flat(piece, str(layout))
        for place, piece, layout in zip(places, pieces, layouts, strict=True)
    }


def _list(packed: Packed, name: str) -> list[Any]:
    values = packed.entry.get(name)
    if not isinstance(values, list):
        raise CodecError(f"expected {name} of records, found {values!r}")
    return values


def unpack(
    record_type: type[R],
    packed: Packed,
    carrier: Carrier = IN_MESSAGE,
    most_bytes: float = math.inf,
) -> R:
    """Unpack a record."""
    layout = _layout(packed)
    return unflatten(record_type, Flat(carrier.get(packed, most_bytes), layout))


def unpack_shared(record_type: type[R], packed: Packed, carrier: Carrier) -> R:
    """Unpack a record; messages that share its numbers give the same object."""
    place = carrier.place(packed)
    if place is None:
        return unpack(record_type, packed, carrier)
    cached = _kept(cast(Hashable, record_type), place, _layout(packed))
    if not cached:
        cached.append(unpack(record_type, packed, carrier))
    return cast(R, cached[0])


# A payload and a reference, which may differ.
@functools.lru_cache(maxsize=2)
def _kept(record_type: type, place: Hashable, layout: str) -> list[object]:  # noqa: ARG001
    """Return the list that holds a record once it is unpacked."""
    return []


def to_content(job: Job | None, packed: dict[str, Packed]) -> RecordDict:
    """Return a message's content: the job and any number of packed records by name."""
    content = RecordDict()
    if job is not None:
        content["job"] = ConfigRecord(dataclasses.asdict(job))
    for name, packed_record in packed.items():
        content[f"{name}.array"] = packed_record.array
        content[f"{name}.entry"] = packed_record.entry
    return content


def reply_name(number: int) -> str:
    """Return the name of the reply of the client with this number in a task."""
    return f"reply.{number}" if number else "reply"


def has_job(content: RecordDict) -> bool:
    """Return whether a request names its job."""
    return "job" in content.config_records


def job_of(content: RecordDict) -> Job:
    """Return the job of a request."""
    job = plain_fields(Job, content.config_records.get("job"))
    if not 0 <= job.timeout_s < math.inf:
        raise CodecError(f"expected a time to work, found {job.timeout_s} s")
    return job


def packed_of(content: RecordDict, name: str) -> Packed | None:
    """Return the packed record called ``name``, or None if there is none."""
    array, entry = content.get(f"{name}.array"), content.get(f"{name}.entry")
    if array is None and entry is None:
        return None
    if not isinstance(array, ArrayRecord) or not isinstance(entry, ConfigRecord):
        raise CodecError(f"expected the array and the entry of a {name}")
    return Packed(array, entry)


def _layout(packed: Packed) -> str:
    layout = packed.entry.get(_LAYOUT)
    if not isinstance(layout, str):
        raise CodecError(f"expected a layout as text, found {type(layout).__name__}")
    return layout
