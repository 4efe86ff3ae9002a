"""Tokenised text: convert texts to ids with a tokenizer of the package transformers."""

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

# Part of the digest: tokenizers with equal vocabularies differ on this text.
_PROBE = "Él's  2 naïve\tCAFÉS—don't\nsay 東京 ﬁ, 🙂!"


@dataclass(frozen=True)
class Tokenizer:
    """Converts texts to ids; opened by `open_tokenizer`."""

    tokenizer: Any
    vocabulary: Vocabulary
    max_tokens: int  # T: longer texts are truncated, shorter texts are padded

    def __call__(self, texts: Sequence[str], source: str) -> NDArray[np.int32]:
        """Convert n texts to ids, int32 of shape (n, 1, 1, T).

        Raises a `DataError` for texts without any id; ``source`` names their file.
        """
        ids = np.empty((len(texts), 1, 1, self.max_tokens), dtype=np.int32)
        for start in range(0, len(texts), _AT_ONCE):
            some = list(texts[start : start + _AT_ONCE])
            ids[start : start + len(some), 0, 0] = self._encoded(some)
        empty = np.flatnonzero((ids == self.vocabulary.padding_id).all(axis=(1, 2, 3)))
        if len(empty):
            raise DataError(
                f"{source}: the tokenizer makes no id of {len(empty)} texts, the first "
                f"of them in row {empty[0] + 1}, counting from 1; fill them in, or "
                "leave the rows out",
                reason=SafeReason(
                    Code.MISSING_VALUE, count=len(empty), row=empty[0] + 1
                ),
            )
        return ids

    def _encoded(self, texts: list[str]) -> Any:
        return self.tokenizer(
            texts, truncation=True, padding="max_length", max_length=self.max_tokens
        )["input_ids"]


@functools.lru_cache(maxsize=4)
def open_tokenizer(folder: Path, max_tokens: int) -> Tokenizer:
    """Open the tokenizer in a folder that `save_pretrained` wrote."""
    import_torchvision()  # before transformers imports it without our fix
    transformers = import_extra("transformers", "transformers", "tokenised text")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, padding_side="right", truncation_side="right"
        )
    # A damaged file raises errors of many types in the package and its Rust part.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{folder} holds no tokenizer that transformers can open ({reason}); "
            "expected what save_pretrained writes: tokenizer.json and "
            "tokenizer_config.json",
            reason=SafeReason(Code.WRONG_TOKENIZER),
        ) from error
    padding_id = tokenizer.pad_token_id
    if padding_id is None:
        # Models that only continue texts usually have no padding token.
        padding_id, tokenizer.pad_token = tokenizer.eos_token_id, tokenizer.eos_token
    if padding_id is None:
        raise DataError(
            f"{folder}: the tokenizer has neither a padding nor an end token to fill "
            "short texts up with; give it one (pad_token)",
            reason=SafeReason(Code.WRONG_TOKENIZER),
        )
    if max_tokens > tokenizer.model_max_length:
        raise DataError(
            f"found data.max_tokens {max_tokens}, but the tokenizer in {folder} is for "
            f"texts of at most {tokenizer.model_max_length}; lower it",
            reason=SafeReason(Code.WRONG_TOKENIZER),
        )
    known = sorted(tokenizer.get_vocab().items())
    identity = json.dumps([known, padding_id, tokenizer(_PROBE)["input_ids"]])
    size = 1 + max(number for _, number in known)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:32]
    return Tokenizer(tokenizer, Vocabulary(size, padding_id, digest), max_tokens)
