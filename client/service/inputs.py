"""From what is sent to the raw inputs that a model takes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic_core import from_json
from torch import Tensor

from client.service.arrays import from_lists, from_npy
from client.service.body import Body, unsupported
from client.service.characters import decode_text, is_text
from client.service.limits import Limits
from client.service.multipart import Part, split_parts
from client.service.pictures import decode_base64, decode_picture, is_picture
from client.service.problems import RequestError
from knnper.data.examples import InputSpec

JSON, NPY, FORM = "application/json", "application/x-npy", "multipart/form-data"
PICTURES = ("image/png", "image/jpeg")
FORM_FIELD = "image"


def read_json(content: bytes) -> Any:
    """Return what JSON text says.

    Raises
    ------
    RequestError
        400 if it is not JSON, is nested too deeply, or has NaN or infinity in it.
    """
    try:
        return from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(400, f"expected JSON: {error}") from error


class InputReader:
    """Reads the inputs of one model.

    Parameters
    ----------
    spec
        Shape and type of one input.
    limits
        How many inputs, and how large images are taken.
    """

    def __init__(self, spec: InputSpec, limits: Limits) -> None:
        self.spec, self._limits = spec, limits
        self.takes_pictures = is_picture(spec.image_shape, spec.dtype)
        self.takes_text = is_text(spec)

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """How lists are nested: the input's shape; (d,) of features or characters."""
        shape: tuple[int, ...] = self.spec.image_shape
        if self.spec.dtype != "uint8" and shape[:2] == (1, 1):
            return shape[2:]
        return shape

    @property
    def media_types(self) -> tuple[str, ...]:
        """What a body of inputs alone may be."""
        return (JSON, NPY, *(PICTURES if self.takes_pictures else ()), FORM)

    def read(self, body: Body) -> Tensor:
        """Return the n inputs of a body, of the input's type and shape (n, ...).

        Raises
        ------
        RequestError
            400, 415 or 422, if they are not as the model takes them.
        """
        if body.media_type == JSON:
            return self._from_json(body.content)
        if body.media_type == FORM:
            limit = self._limits.max_inputs
            parts = split_parts(body.content, body.boundary, limit)
            return self.joined([self._from_part(part) for part in parts])
        return self.joined([self._from_file(body.content, body.media_type)])

    def one(self, given: Any, where: str) -> NDArray[Any]:
        """Return one input that was sent in JSON; see `read`."""
        if isinstance(given, dict) and self.takes_pictures:
            if given.keys() != {"image"} or not isinstance(given["image"], str):
                raise RequestError(
                    422, f'{where}: expected {{"image": "<base64>"}} or nested lists'
                )
            content = decode_base64(given["image"])
            return decode_picture(content, self.spec.image_shape, self._limits)[None]
        if isinstance(given, dict) and self.takes_text:
            if given.keys() != {"text"} or not isinstance(given["text"], str):
                message = f'{where}: expected {{"text": "..."}} or a list'
                raise RequestError(422, message)
            ids = decode_text(given["text"], self.sent_shape[0], where)
            return ids.reshape(1, *self.spec.image_shape)
        array = from_lists(given, self.sent_shape, self.spec.stored_dtype, where)
        return array.reshape(1, *self.spec.image_shape)

    def joined(self, parts: Sequence[NDArray[Any]]) -> Tensor:
        """Return inputs, of shape (n, ...) each, as one tensor.

        Raises
        ------
        RequestError
            422 if there are none, or too many, or an id in a text is of no character.
        """
        count, limit = sum(map(len, parts)), self._limits.max_inputs
        if not 1 <= count <= limit:
            raise RequestError(
                422, f"expected 1 to {limit} inputs in a request, found {count}"
            )
        inputs = np.concatenate(parts)
        if self.spec.dtype == "token" and inputs.max() >= self.spec.num_classes:
            raise RequestError(
                422,
                f"expected ids of characters from 0 to {self.spec.num_classes - 1}, "
                f"found {inputs.max()}",
            )
        return torch.from_numpy(inputs)

    def _from_json(self, content: bytes) -> Tensor:
        document = read_json(content)
        if not isinstance(document, dict) or document.keys() != {"inputs"}:
            raise RequestError(422, 'expected {"inputs": [...]}, and nothing else')
        given = document["inputs"]
        if not isinstance(given, list) or len(given) > self._limits.max_inputs:
            raise RequestError(
                422,
                f"inputs: expected a list of 1 to {self._limits.max_inputs} inputs",
            )
        return self.joined(
            [self.one(one, f"inputs[{place}]") for place, one in enumerate(given)]
        )

    def _from_part(self, part: Part) -> NDArray[Any]:
        if part.name != FORM_FIELD:
            raise RequestError(
                422, f"found a field {part.name!r}, expected {FORM_FIELD!r} only"
            )
        return self._from_file(part.content, part.media_type)

    def _from_file(self, content: bytes, media_type: str) -> NDArray[Any]:
        """Return the inputs in a file, shape (n, ...)."""
        if media_type == NPY:
            array = from_npy(content, self.sent_shape, self.spec.stored_dtype)
            return array.reshape(-1, *self.spec.image_shape)
        if self.takes_pictures and media_type in PICTURES:
            return decode_picture(content, self.spec.image_shape, self._limits)[None]
        raise unsupported(media_type, *self.media_types)
