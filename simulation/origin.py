"""The code and the data that a run was made with, recorded in its folder."""

import functools
import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

import knnper
from knnper.data.catalogue import load_data
from knnper.data.examples import Dataset, LabelledArrays
from knnper.errors import RunError
from knnper.experiment import Experiment
from knnper.files import read_document, write_atomically
from knnper.seeding import RandomKey
from knnper.simulation.partition.split import fingerprint, make_partition
from knnper.weight_files import as_names, is_file_name, located

# The file of the code: its fingerprint and, in a clone of the repository, the commit on
# a second line.
CODE = "code.txt"
INPUTS = "inputs.json"  # the file of the digests of data, weights and split
SHORT = 12  # characters shown of a commit or a fingerprint
_ROOT = Path(__file__).resolve().parents[1]
_ROOMS = ("datastore", "strategies", "client", "server", "simulation")
_ROWS_AT_ONCE = 4096
_NOUNS = {"data": "data set", "weights": "file of weights", "split": "split"}


@functools.cache
def code_fingerprint() -> str:
    """Return the SHA-256, in hexadecimal, of the project's Python files."""
    digest = hashlib.sha256()
    # In a checkout these folders are beside knnper; installed, they are inside it.
    for folder in (Path(knnper.__file__).parent, *(_ROOT / room for room in _ROOMS)):
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(_ROOT)}\n{len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


@functools.cache
def code_commit(root: Path = _ROOT) -> str:
    """Return the commit of the clone in ``root``, with "-dirty" if files differ.

    Empty for an installed package, even inside another repository.
    """
    if not (root / ".git").exists():
        return ""
    # Without optional locks, this never blocks a commit.
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*"]
    command += ["--dirty", f"--abbrev={SHORT}"]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""  # git is not installed, or there is no commit yet
    return done.stdout.strip()


def sign(folder: Path) -> None:
    """Record this code in a run's folder, unless other code began the run."""
    if not (folder / CODE).is_file():
        lines = filter(None, (code_fingerprint(), code_commit()))
        write_atomically(folder / CODE, "\n".join(lines))


def sign_as(folder: Path, origin: Path) -> None:
    """Record that a run reuses a part of the run in ``origin``, made by its code."""
    if fingerprint_in(folder) in ("", code_fingerprint()):
        write_atomically(folder / CODE, "\n".join(_read_code(origin)))


def is_of_this_code(folder: Path) -> bool:
    """Return whether this code made all of a run."""
    return fingerprint_in(folder) == code_fingerprint()


def code_of(folder: Path) -> str:
    """Return the code of a run: its commit, else the fingerprint of its files."""
    match _read_code(folder):
        case [_, commit]:
            return f"commit {commit}"
        case [files]:
            return f"files {files[:SHORT]}"
    return "unknown"


def older_code(folders: Iterable[Path], batch: Path) -> Iterator[str]:
    """Yield a remark on the runs of a batch that other code made."""
    if number := sum(not is_of_this_code(folder) for folder in folders):
        yield (
            f"{number} of the runs in {batch} were made by another version of this "
            "code, or reuse a training of another or an unknown one; to make all with "
            "this version, delete the folder and start again"
        )


def fingerprint_in(folder: Path) -> str:
    """Return the fingerprint of the code that made a run; empty if unknown."""
    return next(iter(_read_code(folder)), "")


def _read_code(folder: Path) -> list[str]:
    """Return the fingerprint and, if known, the commit of a run's code."""
    path = folder / CODE
    if not path.is_file():
        return []
    return path.read_text(encoding="utf-8", errors="replace").split()


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run beside its settings, as SHA-256 in hexadecimal.

    Attributes
    ----------
    data
        Of the content of the data set.
    weights
        Of the file of initial weights; None without one.
    split
        Of the partition; None if unknown.
    """

    data: str
    weights: str | None
    split: str | None = None


def inputs_of(experiment: Experiment) -> Inputs:
    """Return the current inputs of an experiment, without the split."""
    dataset = load_data(experiment.data)
    weights = getattr(experiment.model.settings, "weights", None)
    # Weights that a library knows by name have no file.
    files = [located(name) for name in as_names(weights) if is_file_name(name)]
    return Inputs(content_digest(dataset), _digest_of_files(files))


def split_of(experiment: Experiment) -> str:
    """Return the fingerprint of the current partition of an experiment."""
    dataset = load_data(experiment.data)
    key = RandomKey(experiment.run.seed)
    return fingerprint(make_partition(dataset, experiment.partition, key))


def keep_inputs(folder: Path, inputs: Inputs) -> None:
    """Record the inputs in a run's folder, unless it has them."""
    if not (folder / INPUTS).is_file():
        write_atomically(folder / INPUTS, json.dumps(asdict(inputs), indent=2))


def require_inputs(folder: Path, inputs: Inputs, fix: str | None = None) -> None:
    """Reject a run that was made from other inputs; a run without a record passes.

    ``fix``: An alternative to bringing the inputs back.
    """
    fix = fix or f"delete {folder.parent} to make its runs again"
    recorded = read_inputs(folder)
    if recorded is None:
        return
    for name in (field.name for field in fields(Inputs)):
        expected, current = getattr(recorded, name), getattr(inputs, name)
        is_unknown = name == "split" and None in (expected, current)
        if expected != current and not is_unknown:
            raise RunError(
                f"the {_NOUNS[name]} is not what it was when the run in {folder} was "
                f"made: expected {_shorten(expected)}, found {_shorten(current)}. "
                f"Bring it back, or {fix}"
            )


def read_inputs(folder: Path) -> Inputs | None:
    """Return the inputs that a run's folder records; None without a record."""
    fix = f"delete {folder} to make the run again"
    return read_document(Inputs, folder / INPUTS, fix)


def content_digest(dataset: Dataset) -> str:
    """Return the SHA-256, in hexadecimal, of the examples and the class names."""
    digest = hashlib.sha256("\n".join(dataset.class_names).encode())
    for split in (dataset.train, dataset.test):
        for name in (field.name for field in fields(LabelledArrays)):
            array = getattr(split, name)
            if array is None:
                continue
            digest.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
            # In parts: a data set may be larger than the memory.
            for start in range(0, len(array), _ROWS_AT_ONCE):
                rows = array[start : start + _ROWS_AT_ONCE]
                digest.update(np.ascontiguousarray(rows).data)
    return digest.hexdigest()


def _digest_of_files(files: Sequence[Path]) -> str | None:
    digests = list(map(_file_digest, files))
    if len(digests) > 1:
        return hashlib.sha256("".join(digests).encode()).hexdigest()
    return digests[0] if digests else None


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(
            f"{path} cannot be read, expected a file of weights: {error}"
        ) from error


def _shorten(digest: str | None) -> str:
    return "none" if digest is None else digest[:SHORT]
