"""Compression of updates: fewer bytes from a client to the server, with any method.

A client sends C(Δ) in place of each tensor of its update, where Δ is the tensor's
difference from the payload. The server adds the payload again before anything else
reads the update, so no method needs to know of compression. Tensors that have no
counterpart in the payload are sent uncompressed. So are buffers such as running
variances: they are few, and errors in them do harm.

A biased compressor loses a part of each update. With error feedback the client keeps
the lost part e and adds it to the next difference (Stich et al. 2018, Algorithm 1;
Karimireddy et al. 2019, Algorithm 2):

    p = Δ + e,    send C(p),    e ← p - C(p)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData
from knnper.errors import CodecError
from knnper.own import Kind
from knnper.records import Parts, is_shape, put_together, take_apart
from knnper.seeding import RandomKey
from knnper.settings import Choice, PositiveFraction, Settings, SettingsTypes
from knnper.strategies.core.method import Method, NoSettings
from knnper.strategies.core.predictors import Predictor
from knnper.strategies.core.processing import UpdateProcessor
from knnper.strategies.core.records import NoState, Record, require_finite
from knnper.strategies.core.task import Task

Values = NDArray[np.float32]

_BLOCK = 512
"""Numbers that share a scale: mostly weights of one layer."""
_TINY = np.float32(1e-38)


class Compressor(ABC):
    """Encodes differences as bytes, and decodes them.

    Attributes
    ----------
    error_feedback
        Whether a client keeps the part lost by compression, one more model on its disk,
        and adds it to its next difference. An unbiased compressor does not need it.
    settings_type
        The type of its settings, a frozen dataclass.
    """

    error_feedback: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = NoSettings

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def encode(self, values: Values, rng: RandomKey) -> bytes:
        """Encode ``values``, float32 of shape (d,), all finite."""

    @abstractmethod
    def decode(self, code: bytes, size: int) -> Values:
        """Decode ``code`` as float32 of shape (``size``,).

        ``code`` may be any bytes, since a client may send anything; raise ValueError if
        it is invalid. Up to three zero bytes may follow the result of `encode`.
        """


@dataclass(frozen=True)
class TopKSettings(Settings):
    """Sends the largest differences only.

    Attributes
    ----------
    fraction
        k / d, the fraction of numbers sent, in (0, 1]; useful from 0.001 to 0.1. Each
        takes eight bytes instead of four.
    """

    fraction: PositiveFraction = 0.01


class TopK(Compressor):
    """The k numbers of largest magnitude, with positions (Stich et al. 2018)."""

    settings_type = TopKSettings
    settings: TopKSettings

    @override
    def encode(self, values: Values, rng: RandomKey) -> bytes:
        count, magnitudes = self._count(len(values)), np.abs(values)
        least = np.partition(magnitudes, len(values) - count)[len(values) - count]
        larger = np.flatnonzero(magnitudes > least)
        # Of equal magnitudes the first, however they were sorted.
        equal = np.flatnonzero(magnitudes == least)[: count - len(larger)]
        places = np.sort(np.concatenate([larger, equal])).astype("<i4")
        return _bytes(places, values[places].astype("<f4"))

    @override
    def decode(self, code: bytes, size: int) -> Values:
        count = self._count(size)
        _require_bytes(code, 8 * count)
        places = np.frombuffer(code, "<i4", count)
        ascending = bool((places[1:] > places[:-1]).all())  # differences may overflow
        if not (ascending and places[0] >= 0 and places[-1] < size):
            raise ValueError(f"expected ascending places below {size}, found others")
        values = np.zeros(size, np.float32)
        values[places] = np.frombuffer(code, "<f4", count, 4 * count)
        return values

    def _count(self, size: int) -> int:
        return max(1, round(self.settings.fraction * size))


@dataclass(frozen=True)
class QuantizeSettings(Settings):
    """Sends few bits for each number.

    Attributes
    ----------
    bits
        Bits of each number, sign included; with 2 a number is -1, 0 or 1 times the
        scale of its block.
    """

    bits: Literal[2, 4, 8] = 8


class Quantize(Compressor):
    """Unbiased stochastic rounding to few bits (QSGD, Alistarh et al. 2017).

    With s = 2^(bits - 1) - 1 levels and the largest magnitude m of a block of 512, x is
    sent as the integer l = sign(x) ⌊s |x| / m + u⌋ with u uniform in [0, 1). It is
    decoded as m l / s, and E[m l / s] = x.
    """

    error_feedback = False
    settings_type = QuantizeSettings
    settings: QuantizeSettings

    @override
    def encode(self, values: Values, rng: RandomKey) -> bytes:
        bits, most = self.settings.bits, self._most
        blocks = _blocks(values)
        scales = np.abs(blocks).max(axis=1).astype("<f4")
        uniform = rng.numpy().random(blocks.shape, np.float32)
        magnitudes = np.abs(blocks) / np.maximum(scales, _TINY)[:, None] * most
        levels = np.minimum(np.floor(magnitudes + uniform), most)
        signed = np.copysign(levels, blocks).reshape(-1)[: len(values)]
        coded = (signed + most).astype(np.uint8)
        per_byte = 8 // bits
        rows = np.resize(coded, (math.ceil(len(coded) / per_byte), per_byte))
        shifts = np.arange(per_byte, dtype=np.uint8) * bits
        packed = np.bitwise_or.reduce(rows << shifts, axis=1, dtype=np.uint8)
        return _bytes(scales, packed)

    @override
    def decode(self, code: bytes, size: int) -> Values:
        bits, most = self.settings.bits, self._most
        scales, packed = _scales_and_rest(code, size, bits)
        shifts = np.arange(8 // bits, dtype=np.uint8) * bits
        shifted = packed[:, None] >> shifts
        coded = (shifted & (2**bits - 1)).reshape(-1)[:size]
        fractions = (coded.astype(np.float32) - most) / np.float32(most)  # l / s
        return _scaled(fractions, scales)

    @property
    def _most(self) -> int:
        """The largest level, s."""
        return int(2 ** (self.settings.bits - 1) - 1)


class Sign(Compressor):
    """One bit for each number: its sign, times a block's mean magnitude (EF-signSGD).

    C(p) = ‖p‖₁ / d · sign(p), Karimireddy et al. 2019, section 5, of each 512 numbers.
    """

    @override
    def encode(self, values: Values, rng: RandomKey) -> bytes:
        blocks = _blocks(values)
        counts = np.full(len(blocks), _BLOCK)
        counts[-1] = len(values) - _BLOCK * (len(blocks) - 1)
        scales = (np.abs(blocks).sum(axis=1) / counts).astype("<f4")
        return _bytes(scales, np.packbits(values >= 0))

    @override
    def decode(self, code: bytes, size: int) -> Values:
        scales, packed = _scales_and_rest(code, size, 1)
        signs = np.unpackbits(packed, count=size).astype(np.float32) * 2 - 1
        return _scaled(signs, scales)


def _bytes(*arrays: NDArray[Any]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def _blocks(values: Values) -> Values:
    """Return values as rows of `_BLOCK`, the last row padded with zeros."""
    missing = -len(values) % _BLOCK
    return np.pad(values, (0, missing)).reshape(-1, _BLOCK)


def _scaled(numbers: Values, scales: Values) -> Values:
    """Multiply each number by the scale of its block."""
    # A client may send any scale; updates that are not finite are rejected later.
    with np.errstate(over="ignore", invalid="ignore"):
        values: Values = numbers * np.repeat(scales, _BLOCK)[: len(numbers)]
    return values


def _scales_and_rest(
    code: bytes, size: int, bits: int
) -> tuple[Values, NDArray[np.uint8]]:
    """Split a code into the scale of each block and the bytes of the numbers."""
    num_scales, num_rest = math.ceil(size / _BLOCK), math.ceil(size * bits / 8)
    _require_bytes(code, 4 * num_scales + num_rest)
    payload = np.frombuffer(code, np.uint8, num_rest, 4 * num_scales)
    return np.frombuffer(code, "<f4", num_scales).astype(np.float32), payload


def _require_bytes(code: bytes, expected: int) -> None:
    if not expected <= len(code) <= expected + 3:
        raise ValueError(f"expected a code of {expected} bytes, found {len(code)}")


COMPRESSORS: Mapping[str, type[Compressor]] = {
    "top_k": TopK,
    "quantize": Quantize,
    "sign": Sign,
}
COMPRESSION: SettingsTypes = {
    name: kind.settings_type for name, kind in COMPRESSORS.items()
}
OWN_COMPRESSOR = Kind(
    "a subclass of knnper.strategies.core.compression.Compressor",
    is_right=lambda entry: isinstance(entry, type) and issubclass(entry, Compressor),
)


@dataclass(frozen=True)
class CompressedUpdate(Record):
    """A method's update with its tensors compressed."""

    num_examples: int
    train_loss: float
    structure: str  # of the method's update, by `take_apart`
    whole: dict[str, Tensor]  # uncompressed tensors, by path
    # Compressed tensors by path: the bytes of the code, viewed as float32, followed by
    # the buffers.
    coded: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]  # of the compressed tensors


@dataclass(frozen=True)
class CompressedState(Record):
    """A client's state: the method's state, and the error of compression so far."""

    structure: str  # of the method's state; empty for none
    tensors: dict[str, Tensor]
    left_out: dict[str, Tensor]  # e by the path of the tensor, shape (d,)


class Compressed(UpdateProcessor):
    """A method with compressed updates."""

    def __init__(self, task: Task, method: Method, choice: Choice[Settings]) -> None:
        super().__init__(task, method, choice.settings)
        kind = COMPRESSORS[choice.name] if choice.entry is None else choice.entry
        self._compressor: Compressor = kind(choice.settings)
        self.update_type = CompressedUpdate
        if self._compressor.error_feedback:
            self.client_state_type = CompressedState

    @override
    def process(self, payload: Any, update: Any, rng: RandomKey) -> CompressedUpdate:
        """Compress an update without the error of earlier rounds."""
        return self._encoded(payload, update, {}, rng.child("compression"))[0]

    @override
    def client_update(
        self,
        payload: Any,
        client_state: Any,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[Any, Any]:
        inner_state, update = self.method.client_update(
            payload, self._inner_state(client_state), data, server_round, rng
        )
        require_finite("update", update)
        remembers = isinstance(client_state, CompressedState)
        past = client_state.left_out if remembers else {}
        sent, left_out = self._encoded(payload, update, past, rng.child("compression"))
        if not self._compressor.error_feedback:
            return inner_state, sent
        parts = (
            Parts({}, "")
            if isinstance(inner_state, NoState)
            else take_apart(inner_state)
        )
        return CompressedState(parts.structure, dict(parts.tensors), left_out), sent

    @override
    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> Predictor:
        state = self._inner_state(client_state)
        return self.method.personalize(payload, state, data, rng)

    def _inner_state(self, client_state: Any) -> Any:
        """Return the part of a client's state that is the state of the method below."""
        if not isinstance(client_state, CompressedState):
            return client_state
        if not client_state.structure:
            return None
        parts = Parts(client_state.tensors, client_state.structure)
        return put_together(self.method.client_state_type, parts)

    @override
    def bytes_up(self, client_id: str) -> int:
        num_buffers = len(self.task.model.buffers)
        count = self.num_weights(client_id) - num_buffers
        code = self._compressor.encode(np.zeros(count, np.float32), RandomKey(0))
        return len(code) + 4 * num_buffers

    @override
    def decoded(self, payload: Any, update: CompressedUpdate) -> Any:
        """Decode the method's update; raise CodecError if it is invalid."""
        if not all(is_shape(list(shape)) for shape in update.shapes.values()):
            raise CodecError("expected the shapes of tensors, found others")
        # The tensors' origins may depend on the other fields of the update.
        outline = {
            path: torch.zeros(1).expand(shape) for path, shape in update.shapes.items()
        }
        started = self.require_origins(payload, self._rebuilt(update, outline))
        tensors = {}
        for path, code in update.coded.items():
            origin = started.get(path)
            if origin is None or tuple(origin.shape) != update.shapes.get(path):
                raise CodecError(
                    f"{path}: found no tensor of this name and shape in the payload, "
                    "expected one to which the update is added"
                )
            tensors[path] = self._decoded(code, origin)
        return super().decoded(payload, self._rebuilt(update, tensors))

    def _encoded(
        self, payload: Any, update: Any, past: Mapping[str, Tensor], rng: RandomKey
    ) -> tuple[CompressedUpdate, dict[str, Tensor]]:
        """Compress an update; return it with the error e of each tensor."""
        started = self.require_origins(payload, update)
        coded: dict[str, Tensor] = {}
        left_out: dict[str, Tensor] = {}
        # A site may withhold these two figures, so the structure must not hold them.
        parts = take_apart(replace(update, num_examples=0, train_loss=math.nan))
        whole = dict(parts.tensors)
        for path, tensor in parts.tensors.items():
            origin = started.get(path)
            if origin is None or origin.shape != tensor.shape or not tensor.numel():
                continue
            difference = (tensor - origin).reshape(-1)
            count = self.num_coordinates(tensor)
            values = difference[:count]
            if path in past and past[path].shape == values.shape:
                values = values + past[path]
            code = self._compressor.encode(values.numpy(), rng.child(path))
            packed = torch.frombuffer(
                bytearray(code + bytes(-len(code) % 4)), dtype=torch.float32
            )
            coded[path] = torch.cat([packed, difference[count:]])
            if self._compressor.error_feedback:
                left_out[path] = values - self._values(code, count)
            del whole[path]
        shapes = {path: tuple(parts.tensors[path].shape) for path in coded}
        sent = CompressedUpdate(
            update.num_examples,
            update.train_loss,
            parts.structure,
            whole,
            coded,
            shapes,
        )
        return sent, left_out

    def _decoded(self, code: Tensor, origin: Tensor) -> Tensor:
        count = self.num_coordinates(origin)
        num_buffers = origin.numel() - count
        if code.dim() != 1 or len(code) < num_buffers:
            raise CodecError(f"expected a code, found an array of {tuple(code.shape)}")
        packed = code[: len(code) - num_buffers].numpy().tobytes()
        try:
            values = self._values(packed, count)
        except (ValueError, IndexError) as error:
            raise CodecError(f"the compressed update is damaged: {error}") from error
        difference = torch.cat([values, code[len(code) - num_buffers :]])
        return origin + difference.view(origin.shape)

    def _values(self, code: bytes, count: int) -> Tensor:
        """Decode a code as float32 of shape (count,)."""
        values = torch.from_numpy(self._compressor.decode(code, count))
        if values.shape != (count,):
            raise ValueError(f"expected {count} numbers, found {tuple(values.shape)}")
        return values

    def _rebuilt(self, update: CompressedUpdate, coded: Mapping[str, Tensor]) -> Any:
        parts = Parts({**update.whole, **coded}, update.structure)
        rebuilt: Any = put_together(self.method.update_type, parts)
        num_examples, train_loss = update.num_examples, update.train_loss
        return replace(rebuilt, num_examples=num_examples, train_loss=train_loss)
