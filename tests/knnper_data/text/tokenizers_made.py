"""Tokenizers of a few words, as `save_pretrained` writes them."""

import importlib
from pathlib import Path
from typing import Any

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def make_tokenizer(
    folder: Path, words: tuple[str, ...], padding: str | None = "[PAD]", most: int = 64
) -> Path:
    """Write a tokenizer whose ids are places in `SPECIAL` and then in ``words``."""
    made: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    ids = {word: number for number, word in enumerate((*SPECIAL, *words))}
    one = made.Tokenizer(made.models.WordLevel(ids, unk_token="[UNK]"))
    one.normalizer = made.normalizers.Lowercase()
    one.pre_tokenizer = made.pre_tokenizers.Whitespace()
    one.post_processor = made.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=one,
        unk_token="[UNK]",
        pad_token=padding,
        model_max_length=most,
    )
    fast.save_pretrained(folder)
    return folder
