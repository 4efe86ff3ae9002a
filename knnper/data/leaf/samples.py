"""A user's samples, from JSON to arrays."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from knnper.config.errors import DataError
from knnper.data.text.alphabet import encode

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
    return _Decoder(_images, _image_labels)


def text_decoder() -> Decode:
    """Return what reads the windows of Shakespeare.

    In ``x`` a sample is a text of 80 characters, in ``y`` the character that comes
    next.
    """
    return _Decoder(_windows, _next_characters)


class _Decoder:
    """Reads users' samples, the lists x and y each in its own way."""

    def __init__(
        self,
        read_inputs: Callable[[Any], NDArray[np.uint8]],
        read_labels: Callable[[Any], NDArray[np.int64]],
    ) -> None:
        self._simdjson = _simdjson()
        # One for all users: making one takes as long as reading a user's samples.
        self._parser = self._simdjson.Parser()
        self._read_inputs = read_inputs
        self._read_labels = read_labels

    def __call__(self, text: bytes) -> Samples:
        try:
            x, y = self._lists(text)
            samples = Samples(self._read_inputs(x), self._read_labels(y))
        except (ValueError, TypeError) as error:
            raise SamplesError(
                f"its samples are not as expected: {error}; a user may hold lists only"
            ) from error
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


def _next_characters(y: Any) -> NDArray[np.int64]:
    characters = y.as_list()
    _require_lengths(set(map(len, characters)), 1, "characters of a label")
    return encode("".join(characters)).astype(np.int64)


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
