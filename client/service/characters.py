"""Text as it is sent, as the window of characters that a model takes."""

import numpy as np
from numpy.typing import NDArray

from client.service.problems import RequestError
from knnper.data.examples import InputSpec
from knnper.data.text.alphabet import NUM_TOKENS, encode, plain


def is_text(spec: InputSpec) -> bool:
    """Whether inputs can be sent as text: windows of the alphabet's characters."""
    return spec.dtype == "token" and spec.num_classes == NUM_TOKENS


def decode_text(text: str, length: int, where: str) -> NDArray[np.uint8]:
    """Return the ids of a text's last characters, uint8 of shape (length,).

    Parameters
    ----------
    text
        Whatever a person writes; accents and curly quotation marks become plain.
    length
        T, the characters that the model takes.
    where
        Names the input in messages.

    Raises
    ------
    RequestError
        422 if the text is shorter.
    """
    ids = encode(plain(text))[-length:]
    if len(ids) < length:
        raise RequestError(
            422,
            f"{where}: expected a text of at least {length} characters, of which the "
            f"last {length} are read, found {len(ids)}",
        )
    return ids
