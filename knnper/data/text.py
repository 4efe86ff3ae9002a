"""Data sets of text: characters and their ids, plays, what each speaker says."""

import hashlib
import itertools
import json
import logging
import re
import string
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field

from knnper.data.cache import Contents, EntryWriter, Split, cached_dataset
from knnper.data.csv_files import encoding_problem
from knnper.data.dividing import (
    SPLITS,
    DividingSettings,
    FractionSettings,
    clean_name,
    mark_tested,
    warn_of_merged,
)
from knnper.data.dividing import Split as SiteSplit
from knnper.data.examples import KINDS_OF_INPUT, DataFormat, Dataset
from knnper.data.folders import list_folder
from knnper.data.site_data import (
    ArrayInputs,
    Collected,
    InputForm,
    SiteSettings,
    SiteTask,
    place_of,
)
from knnper.errors import DataError
from knnper.experiment import NonNegativeInt, PositiveInt
from knnper.reasons import Code, SafeReason

ALPHABET = (
    "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]"
    + string.ascii_lowercase + "}"
)  # fmt: skip

UNKNOWN = len(ALPHABET)
NUM_TOKENS = len(ALPHABET) + 1
CHARACTER_NAMES = (*(repr(character) for character in ALPHABET), "unknown")
_FIRST_OUTSIDE = 128

# Curly quotation marks, and the two longer dashes.
_TYPOGRAPHIC = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--")


# The id of each code point up to the first that no character has.
_IDS = np.full(_FIRST_OUTSIDE + 1, UNKNOWN, dtype=np.uint8)
_IDS[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))


def encode(text: str) -> NDArray[np.uint8]:
    """Return the id of each character of ``text``, uint8 of shape (len(text),).

    The ids are those of LEAF's Shakespeare [1]_: a character's place among the 80 of
    `ALPHABET`. Whatever is not among them, such as any character outside ASCII, has the
    id `UNKNOWN`, 80.

    References
    ----------
    .. [1] S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018,
       ``models/utils/language_utils.py``.
    """
    stored = text.encode("utf-32-le", errors="surrogatepass")
    codes = np.frombuffer(stored, dtype="<u4")
    ids: NDArray[np.uint8] = _IDS[np.minimum(codes, _FIRST_OUTSIDE)]
    return ids


def plain(text: str) -> str:
    """Return ``text`` without accents, with plain quotes, dashes and line ends."""
    text = text.replace("\r\n", "\n")
    if text.isascii():
        return text
    parts = unicodedata.normalize("NFKD", text.translate(_TYPOGRAPHIC))
    return "".join(one for one in parts if not unicodedata.combining(one))


_LOG = logging.getLogger(__name__)
_MUCH = 0.1
_HEADING = re.compile(r"\s*(?:ACT|SCENE)\b")
_DIRECTION = re.compile(r"\[[^\]]*\]")

# HAMLET. To be, or not to be    FIRST LORD:    1 CLOWN.    SECOND CLOWN 2.
_IN_CAPITALS = re.compile(
    r" {0,4}((?:\d+ )?[A-Z][A-Z][A-Z' &,-]*(?: \d+)?)[.:](?:\s+(.*))?$"
)

# First Citizen:    Citizen 2:
_ABOVE = re.compile(r"((?:\d+ )?[A-Z][A-Za-z']*(?: [A-Za-z']+){0,3}(?: \d+)?):\s*()$")

#   Ham. To be, or not to be     as LEAF reads Shakespeare's collected works
_INDENTED = re.compile(
    r"  ((?:\d+ )?[A-Z][A-Za-z]*(?: [A-Za-z]+){0,3}(?: \d+)?)\. (.*)$"
)

_ALL_FORMS = (_IN_CAPITALS, _ABOVE, _INDENTED)


def speeches_of(play: str, source: str = "the play") -> Mapping[str, str]:
    """Return what each speaker says in the order of the play, line by line.

    A speech begins with the speaker's name and a full stop or a colon, on its first
    line or on a line of its own. It ends with the next one, with a blank line after its
    words, or with the heading of an act or a scene. Stage directions in square brackets
    are left out. The names are in capitals.

    Names in small letters look like ordinary lines. They count at the beginning, below
    a blank line and below a heading; those of the indented form also within a speech
    that began with one, since its other lines are indented further.
    """
    said = defaultdict[str | None, list[str]](list)
    for speaker, line in _lines(play):
        said[speaker].append(line)
    nobodys = _without_directions("\n".join(said.pop(None, [])))
    texts = {
        speaker: _without_directions("\n".join(lines))
        for speaker, lines in said.items()
        if speaker is not None
    }
    found = {speaker: text for speaker, text in texts.items() if text}
    if found:
        _report(nobodys, sum(map(_num_characters, found.values())), source)
    return found


def _report(nobodys: str, num_said: int, source: str) -> None:
    """Log how much text is neither a speech nor a name, heading or direction."""
    num_lost = _num_characters(nobodys)
    share = num_lost / (num_lost + num_said)
    if share > _MUCH:
        first = nobodys.partition("\n")[0]
        _LOG.warning(
            "%s: %.0f %% of the text belongs to no speaker and is left out, beginning "
            "with %r; a speech ends with a blank line: take out those within speeches, "
            "and see that each begins with a name",
            source,
            100 * share,
            first,
        )
    else:
        _LOG.info("%s: %.1f %% of the text belongs to no speaker", source, 100 * share)


def _num_characters(text: str) -> int:
    """Return how many characters are not blank."""
    return sum(map(len, text.split()))


def _without_directions(text: str) -> str:
    lines = _DIRECTION.sub("", text).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())


def _lines(play: str) -> Iterator[tuple[str | None, str]]:
    """Yield each line with who says it, but for names, headings and blank lines."""
    speaker, has_spoken, is_below_gap = None, False, True
    # How another's speech may begin right below the last one.
    within: tuple[re.Pattern[str], ...] = (_IN_CAPITALS,)
    for line in play.splitlines():
        forms = _ALL_FORMS if is_below_gap else within
        begun = next(filter(None, (form.match(line) for form in forms)), None)
        first = line.strip()
        if begun is not None:
            speaker, first = clean_name(begun[1]).upper(), (begun[2] or "").strip()
            has_spoken = False
            is_indented = begun.re is _INDENTED
            within = (_IN_CAPITALS, _INDENTED) if is_indented else (_IN_CAPITALS,)
        is_heading = _HEADING.match(line) is not None
        if is_heading or (has_spoken and not first):
            speaker = None
        is_below_gap = speaker is None and (is_heading or not first)
        if first and not is_heading:
            has_spoken = speaker is not None
            yield speaker, first


_MANY = 0.05
_MOST = 0.5
_NUM_SHOWN = 5
_WITHOUT_KNOWN = str.maketrans("", "", ALPHABET)


class UnknownCharacters:
    """Counts the characters that are outside of the alphabet: all are one class."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._num_characters = 0

    def count(self, text: str) -> None:
        """Count the characters of ``text``."""
        self._num_characters += len(text)
        self._counts.update(text.translate(_WITHOUT_KNOWN))

    def require_few(self, source: str) -> None:
        """Warn if more than a twentieth is unknown; a `DataError` if more than half."""
        share = self._counts.total() / max(self._num_characters, 1)
        if share <= _MANY:
            return
        # Equally frequent ones in an order that does not depend on the text's.
        ordered = sorted(self._counts.items(), key=lambda pair: (-pair[1], pair[0]))
        commonest = ", ".join(repr(one) for one, _ in ordered[:_NUM_SHOWN])
        message = (
            f"{source}: {share:.0%} of the characters are none of the {len(ALPHABET)} "
            f"that are told apart, most often {commonest}; all of them are one class, "
            "'unknown': write them in Latin letters, or take them out"
        )
        if share > _MOST:
            raise DataError(message)
        _LOG.warning("%s", message)


def target_positions(
    num_characters: int, window: int, stride: int
) -> NDArray[np.int64]:
    """Return which characters of a text are predicted, int64 of shape (n,).

    ``window`` characters must come before; ``stride`` is from one to the next.
    """
    return np.arange(window, num_characters, stride, dtype=np.int64)


def windows_before(
    ids: NDArray[np.uint8], targets: NDArray[np.int64], window: int
) -> NDArray[np.uint8]:
    """Return the T characters before n places in a text's ``ids``, (n, 1, 1, T)."""
    if len(targets) == 0:
        return np.empty((0, 1, 1, window), dtype=np.uint8)
    found: NDArray[np.uint8] = sliding_window_view(ids, window)[targets - window]
    return found[:, None, None, :]


_PLAYS = (
    "a play as plain text (.txt), a folder of such plays, or a file .json with "
    '{"speaker": "text"}'
)


class TextFile(NamedTuple):
    """A file's path and its bytes."""

    path: Path
    content: bytes

    def text(self) -> str:
        """Return what the file says."""
        try:
            return self.content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: byte {error.start} is not UTF-8; convert the file: "
                f"{encoding_problem(self.path)}",
                reason=SafeReason(Code.UNREADABLE_FILE),
            ) from error


def read_files(path: Path, expected: str = _PLAYS) -> tuple[TextFile, ...]:
    """Return the file at ``path``, or the .txt files of a folder in order of names."""
    try:
        paths = [path]
        if path.is_dir():
            found = (Path(entry.path) for entry in list_folder(path))
            paths = [one for one in found if one.suffix.lower() == ".txt"]
        if not paths or not path.exists():
            what = "no file .txt in it" if path.exists() else "nothing there"
            raise DataError(
                f"{path}: found {what}, expected {expected}",
                reason=SafeReason(Code.MISSING_FILE),
            )
        return tuple(TextFile(one, one.read_bytes()) for one in paths)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def texts_of(files: Sequence[TextFile]) -> Mapping[str, str]:
    """Return each client's text by the client's name."""
    if len(files) == 1:
        return _texts_in(files[0])
    return {
        f"{file.path.stem}/{speaker}": text
        for file in files
        for speaker, text in _texts_in(file).items()
    }


def digest_of(texts: Mapping[str, str]) -> str:
    """Return the SHA-256, in hexadecimal, of the clients' names and texts."""
    digest = hashlib.sha256()
    for part in itertools.chain.from_iterable(sorted(texts.items())):
        content = part.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _texts_in(file: TextFile) -> Mapping[str, str]:
    if file.path.suffix.lower() == ".json":
        said_by = _from_json(file.text(), file.path)
        warn_of_merged(said_by, "speakers", str(file.path))
        texts = defaultdict[str, list[str]](list)
        for name, said in said_by.items():
            texts[clean_name(name)].append(plain(said))
        return {name: "\n".join(parts) for name, parts in texts.items()}
    found = speeches_of(plain(file.text()), str(file.path))
    if not found:
        raise DataError(
            f"{file.path}: found no speech, expected lines that begin with who speaks, "
            "as in 'HAMLET. To be', 'HAMLET: To be' or 'First Lord:' above the speech"
        )
    return found


def _from_json(text: str, path: Path) -> Mapping[str, str]:
    try:
        found = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not what is expected: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: found {_kind_of(found)}, expected {_PLAYS}")
    for name, said in found.items():
        if not isinstance(said, str):
            raise DataError(
                f"{path}: found {_kind_of(said)} under {name!r}, expected one text "
                "for each speaker; join its parts"
            )
    return found


def _kind_of(value: object) -> str:
    kinds = {dict: "an object", list: "a list", bool: "a truth value", str: "a text"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, said in pairs:
        if name in found:
            raise ValueError(f"{name!r} occurs more than once; put its texts into one")
        found[name] = said
    return found


# Of one speaker, so that a long text's windows are never all in memory.
_WINDOWS_AT_ONCE = 100_000


@dataclass(frozen=True)
class PlaysSettings(DataFormat):
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
        """Return windows of shape (1, 1, T), `NUM_TOKENS` classes.

        The clients are numbered in the order of their names.

        A `DataError` says that a file cannot be read, nobody speaks in it or says
        enough, or most of it is in characters outside of the alphabet.
        """
        texts = texts_of(read_files(Path(self.path).expanduser().absolute()))
        kept = {key: value for key, value in asdict(self).items() if key != "path"}
        # Of what was found in the files: another way of finding it is another entry.
        source = {"texts": digest_of(texts), **kept}
        return cached_dataset(
            "plays", source, lambda writer: _build(writer, texts, self)
        )


def _build(
    writer: EntryWriter, texts: Mapping[str, str], settings: PlaysSettings
) -> Contents:
    dividing = DividingSettings(
        test_fraction=settings.test_fraction, split=settings.split, seed=settings.seed
    )
    clients = _clients(texts, settings)
    unknown = UnknownCharacters()
    for _, text in clients:
        unknown.count(text)
    unknown.require_few(settings.path)
    num_tested = 0
    for number, (name, text) in enumerate(clients):
        ids = encode(text)
        targets = target_positions(len(ids), settings.window, settings.stride)
        is_test = mark_tested(len(targets), name, dividing)
        by_split: dict[Split, NDArray[np.bool_]] = {"train": ~is_test, "test": is_test}
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
            f"{settings.path}: found too few examples to test on any; raise "
            "data.test_fraction, or lower data.stride"
        )
    names = tuple(name for name, _ in clients)
    return Contents(CHARACTER_NAMES, dtype="token", client_names=names)


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
        num_lost = num_characters - sum(len(text) for _, text in long)
        _LOG.info(
            "%s: left out %d of %d speakers, who have less than %d characters each "
            "and %d of %d together",
            settings.path,
            len(texts) - len(long),
            len(texts),
            least,
            num_lost,
            num_characters,
        )
    return sorted(long)


_EXPECTED = "a file of plain text, or a folder of such files (.txt)"


@dataclass(frozen=True)
class SiteTextSettings(SiteSettings):
    """Which texts, and how examples are made of them.

    Attributes
    ----------
    path
        A file of plain text in UTF-8, or a folder of such files (``.txt``).
    stride
        Characters from one that is predicted to the next.
    """

    name = "text"
    title = "Text"
    summary = "plain text: a window of characters, and the one that follows"

    path: str
    stride: PositiveInt = PlaysSettings.stride

    def collect(self, base: Path, task: SiteTask | None) -> Collected:
        """Return the windows of a site's texts, as long as the federation agreed on."""
        path = place_of(base, self.path)
        if task is not None and task.class_names != CHARACTER_NAMES:
            kind = KINDS_OF_INPUT[task.spec.dtype]
            found = "other characters" if task.spec.dtype == "token" else kind
            raise DataError(
                f"{path} is read as text of {len(CHARACTER_NAMES)} characters, but the "
                f"federation agreed on {found}; give data of another kind",
                reason=SafeReason(Code.WRONG_KIND),
            )
        window = PlaysSettings.window if task is None else task.spec.image_shape[2]
        names: list[str] = []
        windows: list[NDArray[np.uint8]] = []
        labels: list[int] = []
        splits: list[SiteSplit] = []
        for file in read_files(path, _EXPECTED):
            ids = encode(plain(file.text()))
            targets = target_positions(len(ids), window, self.stride)
            windows.append(windows_before(ids, targets, window))
            labels += ids[targets].tolist()
            prefix = f"{file.path.name}/" if path.is_dir() else ""
            names += [f"{prefix}{target:08d}" for target in targets.tolist()]
            splits += _in_order(len(targets), self.fractions)
        if not names:
            raise DataError(
                f"{path}: found no text with more than {window} characters, of which a "
                "window is made; give more text",
                reason=SafeReason(Code.NO_EXAMPLES),
            )
        return Collected(
            source=str(path),
            names=tuple(names),
            labels=tuple(CHARACTER_NAMES[label] for label in labels),
            inputs=WindowInputs(str(path), np.concatenate(windows)),
            splits=tuple(splits),
            given_splits=frozenset(SPLITS),
        )


@dataclass(frozen=True, eq=False)
class WindowInputs(ArrayInputs):
    """Windows of ids, uint8 of shape (n, 1, 1, T)."""

    def form(self) -> InputForm:
        """See `Inputs`."""
        return (1, 1, self.array.shape[3]), "token"


def _in_order(count: int, fractions: FractionSettings) -> list[SiteSplit]:
    """Return the split of each example: first train, then validation, then test."""
    # Windows overlap: examples drawn at random would give away each other.
    held_out = fractions.validation + fractions.test
    num_train = max(int((1 - held_out) * count + 0.5), min(count, 1))
    num_known = max(int((1 - fractions.test) * count + 0.5), num_train)
    sizes = (num_train, num_known - num_train, count - num_known)
    pairs = zip(SPLITS, sizes, strict=True)
    return [split for split, size in pairs for _ in range(size)]
