"""Measured devices: files with the speed and availability of each.

A JSON file is a list of devices, or an object of devices by any id; a CSV file has a
row for each. These fields of a device are read, and others ignored:

==================================== ===================================================
``seconds_per_example``              of training
``examples_per_s``                   the inverse
``computation``                      milliseconds of inference for an example; training
                                     takes three times as long
``bytes_down_per_s``                 of its link
``bytes_up_per_s``
``download_kbps``, ``upload_kbps``   the same in kilobits, thousands of bits
``communication``                    the same for both ways
``tcp_speed_results``                the same as a list of measurements, averaged
``active``, ``inactive``             begin and end of its times, seconds in two lists
``finish_time``                      seconds after which these times repeat
==================================== ===================================================

FedScale (Lai et al. 2022) has ``computation`` and ``communication`` in one file and
``active``, ``inactive`` and ``finish_time`` in another; MobiPerf's records have
``tcp_speed_results``. In CSV a list has spaces between its numbers.
"""

import csv
import hashlib
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnper.errors import DataError
from knnper.experiment import DeviceSettings
from knnper.files import parse_json
from knnper.seeding import RandomKey
from knnper.settings import shown

Row = Mapping[str, Any]
# By name of a field, a function that converts its value.
Units = Mapping[str, Callable[[float], float]]

BYTES_OF_A_KILOBIT = 125.0
TRAINING_PER_INFERENCE = 3.0  # (Lai et al. 2022): there and twice as long back

_SPEEDS: Units = {
    "seconds_per_example": float,
    "examples_per_s": lambda value: 1 / value,
    "computation": lambda value: TRAINING_PER_INFERENCE * value / 1000,
}
_BOTH_DIRECTIONS: Units = {
    "communication": lambda kilobits: kilobits * BYTES_OF_A_KILOBIT,
    "tcp_speed_results": lambda kilobits: kilobits * BYTES_OF_A_KILOBIT,
}
_DOWN: Units = {
    "bytes_down_per_s": float,
    "download_kbps": lambda kilobits: kilobits * BYTES_OF_A_KILOBIT,
}
_UP: Units = {
    "bytes_up_per_s": float,
    "upload_kbps": lambda kilobits: kilobits * BYTES_OF_A_KILOBIT,
}
_TIMES = ("active", "inactive", "finish_time")
KNOWN = (*_SPEEDS, *_DOWN, *_UP, *_BOTH_DIRECTIONS, *_TIMES)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Times:
    """Times at which a device is available, repeated.

    Attributes
    ----------
    spans
        Begin and end of each time, in seconds, in ascending order.
    cycle_s
        Seconds after which the times repeat.
    """

    spans: tuple[tuple[float, float], ...]
    cycle_s: float

    def ends(self) -> Iterator[float]:
        """Yield the ends of times with and without the device, in turn, from 0 on."""
        yield 0.0
        for number in itertools.count():
            for span in self.spans:
                yield from (number * self.cycle_s + at_s for at_s in span)


@dataclass(frozen=True)
class Device:
    """The fields of a device in a file; None for missing fields."""

    seconds_per_example: float | None = None
    bytes_down_per_s: float | None = None
    bytes_up_per_s: float | None = None
    times: Times | None = None


class Traces:
    """The devices of an experiment's files, and their assignment to clients."""

    def __init__(self, settings: DeviceSettings, key: RandomKey) -> None:
        self._key = key
        self._devices = _devices(settings.trace, "trace")
        self._times = [
            device.times
            for device in _devices(settings.availability_trace, "availability_trace")
        ]
        self._require_one_of_each(settings)

    @property
    def has_times(self) -> bool:
        """Whether a file has times of availability."""
        return bool(self._times or (self._devices and self._devices[0].times))

    def device(self, client: str) -> Device:
        """Return the device of a client, sampled uniformly from the file."""
        return self._drawn("trace", client, self._devices) or Device()

    def times(self, client: str) -> Times | None:
        """Return the times of a client; None if no file has any."""
        drawn = self._drawn("availability trace", client, self._times)
        return drawn or self.device(client).times

    def _drawn(self, name: str, client: str, rows: Sequence[Any]) -> Any:
        if not rows:
            return None
        generator = self._key.child(name, client).numpy()
        return rows[int(generator.integers(len(rows)))]

    def _require_one_of_each(self, settings: DeviceSettings) -> None:
        """Refuse settings that a file specifies for each device."""
        first = self._devices[0] if self._devices else Device()
        timed = bool(self._times)
        default = DeviceSettings()
        twice = {
            "speed_spread": first.seconds_per_example is not None,
            "link_spread": None not in (first.bytes_down_per_s, first.bytes_up_per_s),
            "available": timed or first.times is not None,
            "availability_trace": timed and first.times is not None,
        }
        for name, place in twice.items():
            value = getattr(settings, name)
            if place and value != getattr(default, name):
                raise DataError(
                    f"training.devices.{name}: found {shown(value)} beside a file that "
                    "specifies the same for each device, expected one of the two; "
                    "leave this setting out, or the columns"
                )
        if timed and None in self._times:
            raise DataError(
                f"{settings.availability_trace}: expected active, inactive and "
                "finish_time, found a file without them; give it as "
                "training.devices.trace"
            )


def digests(settings: DeviceSettings | None) -> dict[str, str]:
    """Return the SHA-256, in hexadecimal, of each file of traces."""
    by_file = {}
    for name in ("trace", "availability_trace"):
        path = None if settings is None else getattr(settings, name)
        if path is not None:
            by_file[path] = hashlib.sha256(_bytes(path, name)).hexdigest()
    return by_file


def _bytes(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"training.devices.{name}: {path} cannot be read: {error.strerror}; "
            "expected a file of CSV or JSON, from where the command runs"
        ) from error


def _devices(path: str | None, name: str) -> list[Device]:
    """Return the devices of a file; none without one."""
    if path is None:
        return []
    content = _bytes(path, name)
    if content[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise DataError(
            f"{path}: found a pickle, which could run anything, expected CSV or JSON; "
            "docs/virtual_time.md has the two lines that convert one you trust"
        )
    rows = _rows(path, content)
    devices = [_device(row, f"{path}, device {place}") for place, row in rows.items()]
    if not devices:
        raise DataError(f"{path}: found no device, expected at least one")
    rows_by_device = {
        _fields_of(device): place for device, place in zip(devices, rows, strict=True)
    }
    if len(rows_by_device) > 1:
        (fields, row), (other_fields, other_row), *_ = rows_by_device.items()
        raise DataError(
            f"{path}: device {row} has {', '.join(fields) or 'nothing'}, device "
            f"{other_row} has {', '.join(other_fields) or 'nothing'}, expected the "
            "same of all; leave devices out that have less, or the columns"
        )
    (known,) = rows_by_device
    if not known:
        raise DataError(
            f"{path}: found {', '.join(sorted(next(iter(rows.values())))) or 'nothing'}"
            f" of a device, expected some of {', '.join(KNOWN)}"
        )
    log.info("%s: %d devices, with %s", path, len(devices), ", ".join(known))
    return devices


def _fields_of(device: Device) -> tuple[str, ...]:
    return tuple(name for name, value in vars(device).items() if value is not None)


def _rows(path: str, content: bytes) -> dict[str, Row]:
    """Return the fields of each device, by its id or number from 1."""
    try:
        text = content.decode("utf-8-sig")
        if text.lstrip()[:1] in ("{", "["):
            document = parse_json(text)
        else:
            document = list(csv.DictReader(text.splitlines(), strict=True))
    except (ValueError, csv.Error) as error:
        raise DataError(
            f"{path} cannot be read: {error}; expected UTF-8 text, CSV with a head or "
            "JSON"
        ) from error
    if isinstance(document, list):
        document = dict(enumerate(document, 1))
    rows = {str(place): row for place, row in document.items()}
    for place, row in rows.items():
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, device {place}: found {shown(row)}, expected a mapping such "
                'as {"computation": 160.0, "communication": 5600.0}'
            )
        if None in row:  # the key of the module csv for values beyond the header
            raise DataError(
                f"{path}, device {place}: found {len(row) - 1 + len(row[None])} cells, "
                f"expected the {len(row) - 1} of the head; a number has a point, not a "
                "comma"
            )
    return rows


def _device(row: Row, place: str) -> Device:
    """Make the device of a row."""

    def one_of(units: Units) -> float | None:
        present = [name for name in units if _is_given(row.get(name))]
        if len(present) > 1:
            raise DataError(
                f"{place}: found {' and '.join(present)}, expected one of them; leave "
                "the others out"
            )
        for name in present:
            value = units[name](_number(row[name], f"{place}: {name}"))
            return _positive(value, row[name], f"{place}: {name}")
        return None

    return Device(
        seconds_per_example=one_of(_SPEEDS),
        bytes_down_per_s=one_of({**_BOTH_DIRECTIONS, **_DOWN}),
        bytes_up_per_s=one_of({**_BOTH_DIRECTIONS, **_UP}),
        times=_times(row, place),
    )


def _is_given(value: object) -> bool:
    return value is not None and value != ""


def _number(value: object, place: str) -> float:
    """Return a positive number, or the mean of a list."""
    numbers = _numbers(value, place)
    return _positive(statistics.fmean(numbers) if numbers else 0.0, value, place)


def _positive(number: float, value: object, place: str) -> float:
    if not 0 < number < math.inf:
        raise DataError(
            f"{place}: found {shown(value)}, expected a positive number; leave the "
            "device out, or correct it"
        )
    return number


def _numbers(value: object, place: str) -> list[float]:
    items: Any = value.split() if isinstance(value, str) else value
    try:
        numbers = [
            float(item) for item in (items if isinstance(items, list) else [items])
        ]
    except (TypeError, ValueError, OverflowError):
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise DataError(f"{place}: found {shown(value)}, expected numbers")
    return numbers


def _times(row: Row, place: str) -> Times | None:
    """Return the times of a device; None if its row has none."""
    present = [name for name in _TIMES if _is_given(row.get(name))]
    if not present:
        return None
    if missing := [name for name in _TIMES if name not in present]:
        raise DataError(
            f"{place}: found {' and '.join(present)}, expected {' and '.join(missing)} "
            "with it"
        )
    active, inactive = (
        _numbers(row[name], f"{place}: {name}") for name in ("active", "inactive")
    )
    cycle_s = _number(row["finish_time"], f"{place}: finish_time")
    ordered = [
        0.0,
        *itertools.chain(*itertools.zip_longest(active, inactive, fillvalue=math.nan)),
        cycle_s,
    ]
    is_ordered = all(a <= b for a, b in itertools.pairwise(ordered))
    if not is_ordered or sum(inactive) <= sum(active):
        raise DataError(
            f"{place}: found active {shown(row['active'])}, inactive "
            f"{shown(row['inactive'])} and finish_time {shown(row['finish_time'])}, "
            "expected active[0], inactive[0], active[1], ... and finish_time to ascend "
            "from 0; leave the device out, or correct it"
        )
    spans = zip(active, inactive, strict=True)
    return Times(tuple(span for span in spans if span[0] < span[1]), cycle_s)
