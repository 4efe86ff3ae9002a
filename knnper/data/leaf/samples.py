"""A user's samples, from JSON to arrays."""

import importlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from knnper.config.errors import DataError
from knnper.data.text.alphabet import encode
from knnper.data.text.unknown import UnknownCharacters

PIXELS_SHAPE = (28, 28, 1)
NUM_CHARACTERS = 62
WINDOW = 80

_NUM_PIXELS = 28 * 28


@dataclass(frozen=True, eq=False)
class Samples:
    """What one user has.

    Attributes
    ----------
    inputs
        uint8, shape (n, height, width, channels).
    labels
        int64, shape (n,).
    """

    inputs: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: NDArray[np.bool_]) -> "Samples":
        """Return the chosen ones of the n samples."""
        return Samples(self.inputs[chosen], self.labels[chosen])


class SamplesError(Exception):
    """A user's samples are not what they should be."""


Decode: TypeAlias = Callable[[bytes], Samples]
"""Takes ``{"x": [...], "y": [...]}`` and may raise a `SamplesError`."""


def image_decoder() -> Decode:
    """Return what reads the images of FEMNIST.

    In ``x`` an image is a list of 784 numbers in [0, 1], where 1 is white paper; in
    ``y`` it has a label from 0 to 61.
    """
    pixels = _Field("x", _images, "lists of numbers", (int, float))
    return _Decoder(pixels, _Field("y", _image_labels, "whole numbers", (int,)))


def text_decoder(unknown: UnknownCharacters | None = None) -> Decode:
    """Return what reads the windows of Shakespeare.

    In ``x`` a sample is a text of 80 characters, in ``y`` the character that comes
    next.

    Parameters
    ----------
    unknown
        Counts the characters in ``y``.
    """
    counted = UnknownCharacters() if unknown is None else unknown

    def next_characters(y: Any) -> NDArray[np.int64]:
        return _next_characters(y, counted)

    windows = _Field("x", _windows, "texts", (str,))
    return _Decoder(windows, _Field("y", next_characters, "texts", (str,)))


_Array = TypeVar("_Array", bound=NDArray[Any])


@dataclass(frozen=True)
class _Field(Generic[_Array]):
    """One of a user's two lists.

    Attributes
    ----------
    name
        Of the list.
    read
        Makes an array of it.
    expected
        What is in it, in words.
    kinds
        What Python makes of that.
    """

    name: str
    read: Callable[[Any], _Array]
    expected: str
    kinds: tuple[type, ...]

    def array(self, found: Any) -> _Array:
        """Return the list as an array; a `SamplesError` says what does not belong."""
        try:
            return self.read(found)
        except (ValueError, TypeError) as error:
            odd = _first_odd(found.as_list(), self.kinds)
            what = str(error) if odd is None else f"found {odd}"
            raise SamplesError(
                f"its samples are not as expected: in {self.name} {what}, expected "
                f"{self.expected}"
            ) from error


class _Decoder:
    """Reads users' samples, the lists x and y each in its own way."""

    def __init__(
        self, inputs: _Field[NDArray[np.uint8]], labels: _Field[NDArray[np.int64]]
    ) -> None:
        self._simdjson = _simdjson()
        # One for all users: making one takes as long as reading a user's samples.
        self._parser = self._simdjson.Parser()
        self._inputs = inputs
        self._labels = labels

    def __call__(self, text: bytes) -> Samples:
        try:
            x, y = self._lists(text)
        except (ValueError, TypeError) as error:
            raise SamplesError(
                f"its samples are not as expected: {error}; a user may hold lists only"
            ) from error
        samples = Samples(self._inputs.array(x), self._labels.array(y))
        if len(samples.inputs) != len(samples.labels):
            raise SamplesError(
                f"x has {len(samples.inputs)} samples and y {len(samples.labels)}; "
                "expected as many"
            )
        return samples

    def _lists(self, text: bytes) -> tuple[Any, Any]:
        """Return x and y, lists that make Python objects only when asked for."""
        document = self._parser.parse(text)
        if not isinstance(document, self._simdjson.Object):
            raise SamplesError("its samples are no object with x and y")
        x, y = document.get("x"), document.get("y")
        for name, found in (("x", x), ("y", y)):
            if not isinstance(found, self._simdjson.Array):
                raise SamplesError(f"there is no list {name} among its samples")
        return x, y


def _images(x: Any) -> NDArray[np.uint8]:
    _require_lengths({len(image) for image in x}, _NUM_PIXELS, "numbers of an image")
    values = np.frombuffer(x.as_buffer(of_type="d"), dtype=np.float64)
    if np.any((values < 0) | (values > 1)):
        raise SamplesError(
            f"pixels go from {values.min():g} to {values.max():g}; expected 0 to 1"
        )
    return np.rint(values * 255).astype(np.uint8).reshape(-1, *PIXELS_SHAPE)


def _image_labels(y: Any) -> NDArray[np.int64]:
    labels = np.frombuffer(y.as_buffer(of_type="i"), dtype=np.int64)
    if np.any((labels < 0) | (labels >= NUM_CHARACTERS)):
        raise SamplesError(
            f"labels go from {labels.min()} to {labels.max()}; expected 0 to "
            f"{NUM_CHARACTERS - 1}"
        )
    return labels


def _windows(x: Any) -> NDArray[np.uint8]:
    texts = x.as_list()
    _require_lengths(set(map(len, texts)), WINDOW, "characters of a text")
    return encode("".join(texts)).reshape(-1, 1, 1, WINDOW)


def _next_characters(y: Any, unknown: UnknownCharacters) -> NDArray[np.int64]:
    characters = y.as_list()
    _require_lengths(set(map(len, characters)), 1, "characters of a label")
    text = "".join(characters)
    unknown.count(text)
    return encode(text).astype(np.int64)


def _first_odd(values: Iterable[Any], kinds: tuple[type, ...]) -> str | None:
    """Return the first value, however deep in lists, that is of another kind."""
    for value in values:
        if isinstance(value, list):
            odd = _first_odd(value, kinds)
            if odd is not None:
                return odd
        # Python takes true and false for numbers.
        elif isinstance(value, bool) or not isinstance(value, kinds):
            return json.dumps(value, ensure_ascii=False)
    return None


def _require_lengths(found: set[int], expected: int, what: str) -> None:
    wrong = sorted(found - {expected})
    if wrong:
        raise SamplesError(f"found {wrong[0]} {what}; expected {expected}")


def _simdjson() -> Any:
    try:
        return importlib.import_module("simdjson")
    except ModuleNotFoundError as error:
        raise DataError(
            "reading LEAF's files needs the package pysimdjson, which is not "
            "installed; pip install 'knnper[leaf]'"
        ) from error
