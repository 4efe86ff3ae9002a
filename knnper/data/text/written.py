"""Who wrote or says what, read from files of plain text or JSON."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from knnper.config.errors import DataError
from knnper.data.text.alphabet import plain
from knnper.data.text.speeches import speeches_of

_PLAYS = (
    "a play as plain text (.txt), a folder of such plays, or a file .json with "
    '{"speaker": "text"}'
)


@dataclass(frozen=True)
class TextFile:
    """A file's name without its ending, its path and its bytes."""

    name: str
    path: Path
    content: bytes


def read_files(path: Path, expected: str = _PLAYS) -> tuple[TextFile, ...]:
    """Return the file at ``path``, or the .txt files of a folder in order of names.

    Hidden files of a folder, whose names begin with a dot, are left out. ``expected``
    says in errors what could be there.

    Raises
    ------
    DataError
        If there is none, or it cannot be read.
    """
    try:
        paths = _visible_texts(path) if path.is_dir() else [path]
        if not paths or not path.exists():
            what = "no file .txt in it" if path.exists() else "nothing there"
            raise DataError(f"{path}: found {what}, expected {expected}")
        return tuple(TextFile(one.stem, one, one.read_bytes()) for one in paths)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _visible_texts(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() == ".txt" and not path.name.startswith(".")
    )


def texts_of(files: Sequence[TextFile]) -> Mapping[str, str]:
    """Return each client's text by the client's name.

    A speaker of one play among several is another client in another play.

    Raises
    ------
    DataError
        If a file is not UTF-8, is another JSON than expected, or nobody speaks in it.
    """
    if len(files) == 1:
        return _texts_in(files[0])
    return {
        f"{file.name}/{speaker}": text
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


def plain_text(file: TextFile) -> str:
    """Return what a file says, see `knnper.data.text.alphabet.plain`.

    Raises
    ------
    DataError
        If it is not UTF-8.
    """
    return plain(_decoded(file))


def _texts_in(file: TextFile) -> Mapping[str, str]:
    if file.path.suffix.lower() == ".json":
        said_by = _from_json(_decoded(file), file.path)
        return {name: plain(said) for name, said in said_by.items()}
    found = speeches_of(plain_text(file), str(file.path))
    if not found:
        raise DataError(
            f"{file.path}: found no speech, expected lines that begin with who speaks, "
            "as in 'HAMLET. To be', 'HAMLET: To be' or 'First Lord:' above the speech"
        )
    return found


def _decoded(file: TextFile) -> str:
    try:
        return file.content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.path}: byte {error.start} is not UTF-8; convert the file"
        ) from error


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
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs more than once; put its texts into one")
    return found
