"""The next character of what the speakers of plays say; each speaker is a client."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from knnper.config.errors import DataError
from knnper.config.ranges import NonNegativeInt, PositiveInt
from knnper.config.sections import Settings
from knnper.data.cache import cached_dataset
from knnper.data.cache_entry import Contents, EntryWriter, Split
from knnper.data.dataset import Dataset
from knnper.data.leaf.dividing import DividingSettings, mark_tested
from knnper.data.text.alphabet import CHARACTER_NAMES, encode
from knnper.data.text.unknown import UnknownCharacters
from knnper.data.text.windows import target_positions, windows_before
from knnper.data.text.written import digest_of, read_files, texts_of

_LOG = logging.getLogger(__name__)

# Of one speaker, so that a long text's windows are never all in memory.
_WINDOWS_AT_ONCE = 100_000


@dataclass(frozen=True)
class PlaysSettings(Settings):
    """Where the texts are, and how examples are made of them.

    Attributes
    ----------
    path
        A play as plain text, a folder of plays (``.txt``), or a JSON file
        ``{"speaker": "text"}``.
    window
        T, the characters that a prediction is made from; 80 in LEAF.
    stride
        Characters from one that is predicted to the next; 1 in LEAF.
    min_characters
        Speakers with less text are left out, and so are those with no more than a
        window of it.
    test_fraction
        Part of each speaker's examples that is tested on, rounded.
    split
        ``time`` tests on the last part of what each speaker says, ``random`` on any
        examples: their windows then overlap with those that are trained on.
    seed
        Of the choice with ``random``.
    """

    path: str
    window: PositiveInt = 80
    stride: PositiveInt = 10
    min_characters: NonNegativeInt = 1000
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    split: Literal["time", "random"] = "time"
    seed: NonNegativeInt = 0


def load_plays(settings: PlaysSettings) -> Dataset:
    """Return windows of shape (1, 1, T) and what follows them, `NUM_TOKENS` classes.

    The clients are numbered in the order of their names.

    Raises
    ------
    DataError
        If a file cannot be read, nobody speaks in it, nobody says enough, or most of
        it is in characters outside of the alphabet.
    """
    texts = texts_of(read_files(Path(settings.path).expanduser().absolute()))
    kept = {key: value for key, value in asdict(settings).items() if key != "path"}
    # Of what was found in the files: another way of finding it is another entry.
    source = {"texts": digest_of(texts), **kept}
    return cached_dataset(
        "plays", source, lambda writer: _build(writer, texts, settings)
    )


def _build(
    writer: EntryWriter, texts: Mapping[str, str], settings: PlaysSettings
) -> Contents:
    dividing = DividingSettings(
        test_fraction=settings.test_fraction, split=settings.split, seed=settings.seed
    )
    clients = _clients(texts, settings)
    _require_known_characters(clients, settings)
    num_tested = 0
    for number, (name, text) in enumerate(clients):
        ids = encode(text)
        targets = target_positions(len(ids), settings.window, settings.stride)
        is_test = mark_tested(len(targets), name, dividing)
        by_split: dict[Split, NDArray[np.int64]] = {
            "train": targets[~is_test],
            "test": targets[is_test],
        }
        for split, chosen in by_split.items():
            for start in range(0, len(chosen), _WINDOWS_AT_ONCE):
                some = chosen[start : start + _WINDOWS_AT_ONCE]
                windows = windows_before(ids, some, settings.window)
                labels = ids[some].astype(np.int64)
                writer.append_of_client(split, windows, labels, number)
        num_tested += int(is_test.sum())
    if num_tested == 0:
        raise DataError(
            f"{settings.path}: found too few examples to test on any; raise "
            "data.test_fraction, or lower data.stride"
        )
    return Contents(CHARACTER_NAMES, dtype="token")


def _require_known_characters(
    clients: Sequence[tuple[str, str]], settings: PlaysSettings
) -> None:
    unknown = UnknownCharacters()
    for _, text in clients:
        unknown.count(text)
    unknown.require_few(settings.path)


def _clients(
    texts: Mapping[str, str], settings: PlaysSettings
) -> list[tuple[str, str]]:
    """Return name and text of all who say enough, in the order of their names."""
    least = max(settings.min_characters, settings.window + 1)
    long = [(name, text) for name, text in texts.items() if len(text) >= least]
    if not long:
        longest = max(map(len, texts.values()), default=0)
        raise DataError(
            f"{settings.path}: found no speaker with {least} characters, the longest "
            f"text has {longest}; lower data.min_characters or data.window"
        )
    if len(long) < len(texts):
        num_characters = sum(map(len, texts.values()))
        kept = sum(len(text) for _, text in long)
        _LOG.info(
            "%s: left out %d of %d speakers, who have less than %d characters each "
            "and %d of %d together",
            settings.path,
            len(texts) - len(long),
            len(texts),
            least,
            num_characters - kept,
            num_characters,
        )
    return sorted(long)
