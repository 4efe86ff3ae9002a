"""The code and the data that a run was made with, noted in its folder."""

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

# In a run's folder: the fingerprint of the code that made it and, in a clone of the
# repository, the commit on a second line.
CODE = "code.txt"
SHORT = 12  # characters of a commit or a fingerprint that name it
_ROOT = Path(__file__).resolve().parents[1]
_ROOMS = ("datastore", "strategies", "client", "server", "simulation")
INPUTS = "inputs.json"  # in a run's folder: the digests of what it was made from
_ROWS_AT_ONCE = 4096
_CALLED = {"data": "data set", "weights": "file of weights", "split": "split"}


@functools.cache
def code_fingerprint() -> str:
    """Return a SHA-256, in hexadecimal, of the project's Python files."""
    digest = hashlib.sha256()
    # Installed, the rooms are inside of knnper; in a checkout they are beside it.
    for place in (Path(knnper.__file__).parent, *(_ROOT / room for room in _ROOMS)):
        for path in sorted(place.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(_ROOT)}\n{len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


@functools.cache
def code_commit(root: Path = _ROOT) -> str:
    """Return the commit of the clone in ``root``, with "-dirty" if files differ.

    Empty for an installed package, even one inside somebody else's repository.
    """
    if not (root / ".git").exists():
        return ""
    # Without optional locks it never gets in the way of a commit.
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*"]
    command += ["--dirty", f"--abbrev={SHORT}"]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""  # no git on this machine, or no commit yet
    return done.stdout.strip()


def sign(folder: Path) -> None:
    """Note in a run's folder that this code makes it, unless other code began it."""
    if not (folder / CODE).is_file():
        lines = filter(None, (code_fingerprint(), code_commit()))
        write_atomically(folder / CODE, "\n".join(lines))


def sign_as(folder: Path, origin: Path) -> None:
    """Note that a run has a part of the one in ``origin``: older code made both."""
    if fingerprint_in(folder) in ("", code_fingerprint()):
        write_atomically(folder / CODE, "\n".join(_signature(origin)))


def is_of_this_code(folder: Path) -> bool:
    """Return whether no other code had a part in a run."""
    return fingerprint_in(folder) == code_fingerprint()


def code_of(folder: Path) -> str:
    """Return which code made a run: its commit, else its files' fingerprint."""
    match _signature(folder):
        case [_, commit]:
            return f"commit {commit}"
        case [files]:
            return f"files {files[:SHORT]}"
    return "unknown"


def num_made_otherwise(folders: Iterable[Path]) -> int:
    """Return how many of the runs in these folders other code made."""
    return sum(not is_of_this_code(folder) for folder in folders)


def older_code(folders: Iterable[Path], batch: Path) -> Iterator[str]:
    """Yield what to tell of runs that other code made."""
    if older := num_made_otherwise(folders):
        yield (
            f"{older} of the runs in {batch} were made by another version of this "
            "code, or go on from a training of another or an unknown one; to have all "
            "from this one, delete the folder and start again, training anew"
        )


def fingerprint_in(folder: Path) -> str:
    """Return the fingerprint of the code that made a run; empty if unknown."""
    return next(iter(_signature(folder)), "")


def _signature(folder: Path) -> list[str]:
    path = folder / CODE
    if not path.is_file():
        return []
    return path.read_text(encoding="utf-8", errors="replace").split()


@dataclass(frozen=True)
class Inputs:
    """What a run is made from beside its settings, as SHA-256 in hexadecimal."""

    data: str  # the content of the data set
    weights: str | None  # the file that training begins with; None without one
    split: str | None = None  # who has which examples; compared where both tell it


def inputs_of(experiment: Experiment) -> Inputs:
    """Return what an experiment would be made from now, without the split."""
    dataset = load_data(experiment.data)
    weights = getattr(experiment.model.settings, "weights", None)
    # Others are known to a library by name.
    files = [located(name) for name in as_names(weights) if is_file_name(name)]
    return Inputs(content_digest(dataset), _digest_of_files(files))


def split_of(experiment: Experiment) -> str:
    """Return the fingerprint of who would have which examples now."""
    dataset = load_data(experiment.data)
    key = RandomKey(experiment.run.seed)
    return fingerprint(make_partition(dataset, experiment.partition, key))


def keep_inputs(folder: Path, inputs: Inputs) -> None:
    """Note in a run's folder what it is made from, unless that is known."""
    if not (folder / INPUTS).is_file():
        write_atomically(folder / INPUTS, json.dumps(asdict(inputs), indent=2))


def require_inputs(folder: Path, inputs: Inputs, mend: str | None = None) -> None:
    """Do nothing if a run is there that was made from these, or none, or an old one."""
    mend = mend or f"delete {folder.parent} to make its runs anew"
    before = read_inputs(folder)
    if before is None:
        return
    for name in (field.name for field in fields(Inputs)):
        expected, found = getattr(before, name), getattr(inputs, name)
        if expected != found and not (name == "split" and None in (expected, found)):
            raise RunError(
                f"the {_CALLED[name]} is not what it was when the run in {folder} was "
                f"made: expected {_shown(expected)}, found {_shown(found)}. Bring it "
                f"back, or {mend}"
            )


def content_digest(dataset: Dataset) -> str:
    """Return a SHA-256, in hexadecimal, of the examples and the class names."""
    digest = hashlib.sha256("\n".join(dataset.class_names).encode())
    for split in (dataset.train, dataset.test):
        for name in (field.name for field in fields(LabelledArrays)):
            array = getattr(split, name)
            if array is None:
                continue
            digest.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
            # A data set may be larger than the memory.
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


def read_inputs(folder: Path) -> Inputs | None:
    """Return what a run's folder says that it was made from; None where it does not."""
    mend = f"delete {folder} to make the run anew"
    return read_document(Inputs, folder / INPUTS, mend)


def _shown(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
