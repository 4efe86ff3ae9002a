"""Texts as ids: a tokenizer of the package transformers, and what it makes of texts."""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnper.data.examples import Vocabulary
from knnper.errors import DataError
from knnper.process import import_extra, import_torchvision
from knnper.reasons import Code, SafeReason

_AT_ONCE = 1000

# What tells tokenizers apart whose vocabularies are equal.
_PROBE = "Él's  2 naïve\tCAFÉS—don't\nsay 東京 ﬁ, 🙂!"


@dataclass(frozen=True)
class Tokenizer:
    """Makes ids of texts; opened by `open_tokenizer`."""

    made: Any
    vocabulary: Vocabulary  # what the ids mean
    max_tokens: int  # T of a text: longer ones are cut off, shorter ones filled up

    def __call__(self, texts: Sequence[str], source: str) -> NDArray[np.int32]:
        """Return the ids of n texts, int32 of shape (n, 1, 1, T).

        A `DataError` says which texts have no id at all.
        """
        ids = np.empty((len(texts), 1, 1, self.max_tokens), dtype=np.int32)
        for start in range(0, len(texts), _AT_ONCE):
            some = list(texts[start : start + _AT_ONCE])
            ids[start : start + len(some), 0, 0] = self._encoded(some)
        empty = np.flatnonzero((ids == self.vocabulary.padding_id).all(axis=(1, 2, 3)))
        if len(empty):
            raise DataError(
                f"{source}: {len(empty)} texts have nothing in them for the tokenizer, "
                f"the first of them is row {empty[0] + 1}, counting from 1; fill them "
                "in, or leave the rows out",
                reason=SafeReason(
                    Code.MISSING_VALUE, count=len(empty), row=empty[0] + 1
                ),
            )
        return ids

    def _encoded(self, texts: list[str]) -> Any:
        return self.made(
            texts, truncation=True, padding="max_length", max_length=self.max_tokens
        )["input_ids"]


@functools.lru_cache(maxsize=4)
def open_tokenizer(folder: Path, max_tokens: int) -> Tokenizer:
    """Return the tokenizer in a folder, as `save_pretrained` writes it."""
    import_torchvision()  # transformers does, in the plain way
    transformers = import_extra("transformers", "transformers", "tokenised text")
    try:
        made = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, padding_side="right", truncation_side="right"
        )
    # Whatever a damaged file makes the package, and its own in Rust, raise.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{folder} holds no tokenizer that transformers can open ({reason}); "
            "expected what save_pretrained writes: tokenizer.json and "
            "tokenizer_config.json",
            reason=SafeReason(Code.WRONG_TOKENIZER),
        ) from error
    padding_id = made.pad_token_id
    if padding_id is None:
        # As usual with models that only go on writing.
        padding_id, made.pad_token = made.eos_token_id, made.eos_token
    if padding_id is None:
        raise DataError(
            f"{folder}: the tokenizer has neither a padding nor an end token to fill "
            "short texts up with; give it one (pad_token)",
            reason=SafeReason(Code.WRONG_TOKENIZER),
        )
    if max_tokens > made.model_max_length:
        raise DataError(
            f"found data.max_tokens {max_tokens}, but the tokenizer in {folder} is for "
            f"texts of at most {made.model_max_length}; lower it",
            reason=SafeReason(Code.WRONG_TOKENIZER),
        )
    known = sorted(made.get_vocab().items())
    told = json.dumps([known, padding_id, made(_PROBE)["input_ids"]])
    size = 1 + max(number for _, number in known)
    digest = hashlib.sha256(told.encode()).hexdigest()[:32]
    return Tokenizer(made, Vocabulary(size, padding_id, digest), max_tokens)
