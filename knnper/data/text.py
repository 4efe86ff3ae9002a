"""Data sets and site data in text files: plays, speakers and plain text."""

import hashlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import override

from knnper.data.cache import CentralSplit, DatasetContents, EntryWriter, cached_dataset
from knnper.data.characters import (
    CHARACTER_NAMES,
    UnknownCharacters,
    encode,
    plain,
    target_positions,
    windows_before,
)
from knnper.data.csv_files import encoding_problem
from knnper.data.dividing import (
    SPLITS,
    DividingSettings,
    FractionSettings,
    Split,
    clean_name,
    mark_tested,
    warn_of_merged,
)
from knnper.data.examples import KINDS_OF_INPUT, DataFormat, Dataset
from knnper.data.folders import list_folder
from knnper.data.site_data import CollectedExamples, SiteSettings, place_of
from knnper.data.site_inputs import ArrayInputs, InputForm
from knnper.data.site_task import SiteTask
from knnper.data.speeches import find_speeches
from knnper.errors import DataError
from knnper.reasons import Code, SafeReason
from knnper.settings import NonNegativeInt, PositiveInt

_LOG = logging.getLogger(__name__)
_PLAYS = (
    "a play as plain text (.txt), a folder of such plays, or a file .json with "
    '{"speaker": "text"}'
)
# Windows of one speaker in memory at the same time.
_WINDOWS_AT_ONCE = 100_000
_EXPECTED = "a file of plain text, or a folder of such files (.txt)"


class TextFile(NamedTuple):
    """Path and content of a file."""

    path: Path
    content: bytes

    def text(self) -> str:
        """Decode the content from UTF-8."""
        try:
            return self.content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: byte {error.start} is not UTF-8; convert the file: "
                f"{encoding_problem(self.path)}",
                reason=SafeReason(Code.UNREADABLE_FILE),
            ) from error


def read_files(path: Path, expected: str = _PLAYS) -> tuple[TextFile, ...]:
    """Read the file at ``path``, or the .txt files of a folder sorted by name."""
    try:
        paths = [path]
        if path.is_dir():
            entries = (Path(entry.path) for entry in list_folder(path))
            paths = [file for file in entries if file.suffix.lower() == ".txt"]
        if not paths or not path.exists():
            contents = "no .txt file in it" if path.exists() else "no file or folder"
            raise DataError(
                f"{path}: found {contents}, expected {expected}",
                reason=SafeReason(Code.MISSING_FILE),
            )
        return tuple(TextFile(file, file.read_bytes()) for file in paths)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_texts(files: Sequence[TextFile]) -> Mapping[str, str]:
    """Return the text of each client by its name."""
    if len(files) == 1:
        return _texts_in(files[0])
    return {
        f"{file.path.stem}/{speaker}": text
        for file in files
        for speaker, text in _texts_in(file).items()
    }


def hash_texts(texts: Mapping[str, str]) -> str:
    """Hash the names and texts of the clients with SHA-256."""
    digest = hashlib.sha256()
    for part in itertools.chain.from_iterable(sorted(texts.items())):
        content = part.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _texts_in(file: TextFile) -> Mapping[str, str]:
    if file.path.suffix.lower() == ".json":
        try:
            text_of = TypeAdapter(dict[str, str]).validate_json(file.text())
        except ValidationError as error:
            raise DataError(f"{file.path}: expected {_PLAYS}: {error}") from error
        warn_of_merged(text_of, "speakers", str(file.path))
        texts = defaultdict[str, list[str]](list)
        for name, text in text_of.items():
            texts[clean_name(name)].append(plain(text))
        return {name: "\n".join(parts) for name, parts in texts.items()}
    speeches = find_speeches(plain(file.text()), str(file.path))
    if not speeches:
        raise DataError(
            f"{file.path}: found no speech, expected lines that begin with a speaker, "
            "such as 'HAMLET. To be', 'HAMLET: To be' or 'First Lord:' above the speech"
        )
    return speeches


@dataclass(frozen=True)
class PlaysSettings(DataFormat):
    """Settings of plays: the files, windows of characters, and the split.

    Attributes
    ----------
    path
        A play as plain text, a folder of plays (``.txt``), or a JSON file
        ``{"speaker": "text"}``.
    window
        Number of characters before the predicted one, T; 80 in LEAF.
    stride
        Distance between predicted characters; 1 in LEAF.
    min_characters
        Speakers with less text, or with no more than a window of it, are left out.
    test_fraction
        Fraction of test examples of each speaker, rounded.
    split
        ``time`` tests on the end of each speaker's text, ``random`` on random
        examples, whose windows then overlap with those of training examples.
    seed
        Seed of the random choice.
    """

    name = "plays"
    title = "Plays"
    summary = "your own text: plays, or what each speaker says; the next character"

    path: str
    window: PositiveInt = 80
    stride: PositiveInt = 10
    min_characters: NonNegativeInt = 1000
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    split: Literal["time", "random"] = "time"
    seed: NonNegativeInt = 0

    def load(self) -> Dataset:
        """Load windows of shape (1, 1, T), with `NUM_TOKENS` classes.

        Clients are numbered in the order of their names. Raises a `DataError` if a file
        cannot be read, if no speaker has enough text, or if most characters are outside
        of the alphabet.

        """
        texts = read_texts(read_files(Path(self.path).expanduser().absolute()))
        settings = {key: value for key, value in asdict(self).items() if key != "path"}
        # The key is the parsed text, so that changes of the parser count, too.
        source = {"texts": hash_texts(texts), **settings}
        return cached_dataset(
            "plays", source, lambda writer: _write_windows(writer, texts, self)
        )


def _write_windows(
    writer: EntryWriter, texts: Mapping[str, str], settings: PlaysSettings
) -> DatasetContents:
    dividing = DividingSettings(
        test_fraction=settings.test_fraction, split=settings.split, seed=settings.seed
    )
    clients = _select_speakers(texts, settings)
    unknown = UnknownCharacters()
    for _, text in clients:
        unknown.count(text)
    unknown.require_few(settings.path)
    num_tested = 0
    for number, (name, text) in enumerate(clients):
        ids = encode(text)
        targets = target_positions(len(ids), settings.window, settings.stride)
        is_test = mark_tested(len(targets), name, dividing)
        by_split: dict[CentralSplit, NDArray[np.bool_]] = {
            "train": ~is_test,
            "test": is_test,
        }
        for split, is_chosen in by_split.items():
            chosen = targets[is_chosen]
            for start in range(0, len(chosen), _WINDOWS_AT_ONCE):
                some = chosen[start : start + _WINDOWS_AT_ONCE]
                windows = windows_before(ids, some, settings.window)
                labels = ids[some].astype(np.int64)
                writer.append_of_client(split, windows, labels, number)
        num_tested += int(is_test.sum())
    if num_tested == 0:
        raise DataError(
            f"{settings.path}: found too few examples for test data; raise "
            "data.test_fraction, or lower data.stride"
        )
    names = tuple(name for name, _ in clients)
    return DatasetContents(CHARACTER_NAMES, dtype="token", client_names=names)


def _select_speakers(
    texts: Mapping[str, str], settings: PlaysSettings
) -> list[tuple[str, str]]:
    """Return name and text of the speakers with enough text, sorted by name."""
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
        num_lost = num_characters - sum(len(text) for _, text in long)
        _LOG.info(
            "%s: left out %d of %d speakers with less than %d characters each, %d of "
            "%d characters in total",
            settings.path,
            len(texts) - len(long),
            len(texts),
            least,
            num_lost,
            num_characters,
        )
    return sorted(long)


@dataclass(frozen=True)
class SiteTextSettings(SiteSettings):
    """Settings of a site's texts.

    Attributes
    ----------
    path
        A file of plain text in UTF-8, or a folder of such files (``.txt``).
    stride
        Distance between predicted characters.
    """

    name = "text"
    title = "Text"
    summary = "plain text: a window of characters, and the one that follows"

    path: str
    stride: PositiveInt = PlaysSettings.stride

    def collect(self, base: Path, task: SiteTask | None) -> CollectedExamples:
        """Collect windows of the texts, of the length that the federation agreed on."""
        path = place_of(base, self.path)
        if task is not None and task.class_names != CHARACTER_NAMES:
            kind = KINDS_OF_INPUT[task.spec.dtype]
            agreed = "other characters" if task.spec.dtype == "token" else kind
            raise DataError(
                f"{path} is read as text of {len(CHARACTER_NAMES)} characters, but the "
                f"federation agreed on {agreed}; give data of another kind",
                reason=SafeReason(Code.WRONG_KIND),
            )
        window = PlaysSettings.window if task is None else task.spec.image_shape[2]
        names: list[str] = []
        windows: list[NDArray[np.uint8]] = []
        labels: list[int] = []
        splits: list[Split] = []
        for file in read_files(path, _EXPECTED):
            ids = encode(plain(file.text()))
            targets = target_positions(len(ids), window, self.stride)
            windows.append(windows_before(ids, targets, window))
            labels += ids[targets].tolist()
            prefix = f"{file.path.name}/" if path.is_dir() else ""
            names += [f"{prefix}{target:08d}" for target in targets.tolist()]
            splits += _split_in_order(len(targets), self.fractions)
        if not names:
            raise DataError(
                f"{path}: found no text with more than {window} characters, the "
                "length of a window; give more text",
                reason=SafeReason(Code.NO_EXAMPLES),
            )
        return CollectedExamples(
            source=str(path),
            names=tuple(names),
            labels=tuple(CHARACTER_NAMES[label] for label in labels),
            inputs=WindowInputs(str(path), np.concatenate(windows)),
            splits=tuple(splits),
            given_splits=frozenset(SPLITS),
        )


@dataclass(frozen=True, eq=False)
class WindowInputs(ArrayInputs):
    """Windows of character ids, uint8 of shape (n, 1, 1, T)."""

    @override
    def form(self) -> InputForm:
        return (1, 1, self.array.shape[3]), "token"


def _split_in_order(count: int, fractions: FractionSettings) -> list[Split]:
    """Assign the first examples to train, the next to validation, the last to test."""
    # A random split would leak, since neighbouring windows overlap.
    held_out = fractions.validation + fractions.test
    num_train = max(int((1 - held_out) * count + 0.5), min(count, 1))
    num_known = max(int((1 - fractions.test) * count + 0.5), num_train)
    sizes = (num_train, num_known - num_train, count - num_known)
    pairs = zip(SPLITS, sizes, strict=True)
    return [split for split, size in pairs for _ in range(size)]
