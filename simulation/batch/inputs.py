"""Which data and weights made a run: a file may change where it is."""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from knnper.config.errors import RunError
from knnper.config.sections import Experiment
from knnper.data.catalogue import DATA_SETS
from knnper.data.dataset import Dataset, LabelledArrays
from knnper.durable_files import write_atomically
from simulation.partition.split import fingerprint
from simulation.workbench import deal

INPUTS = "inputs.json"
"""In a run's folder: the digests of what it was made from."""

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Inputs:
    """What a run is made from beside its settings, as SHA-256 in hexadecimal.

    Attributes
    ----------
    data
        Of the data set's content.
    weights
        Of the file of weights that training begins with; None without one.
    split
        Of who has which examples; None where nobody has dealt them.
    """

    data: str
    weights: str | None
    split: str | None = None


_DOCUMENT = TypeAdapter(Inputs)
_CALLED = {"data": "data set", "weights": "file of weights", "split": "split"}


def inputs_of(experiment: Experiment) -> Inputs:
    """Return what an experiment would be made from now, without the split.

    Raises
    ------
    DataError
        If the data cannot be loaded.
    RunError
        If the file of weights cannot be read.
    """
    dataset = DATA_SETS[experiment.data.name].load(experiment.data.settings)
    weights = getattr(experiment.model.settings, "weights", None)
    return Inputs(content_digest(dataset), _file_digest(weights) if weights else None)


def split_of(experiment: Experiment) -> str:
    """Return the fingerprint of who would have which examples now.

    Raises
    ------
    DataError
        If the data cannot be loaded or dealt.
    """
    dataset = DATA_SETS[experiment.data.name].load(experiment.data.settings)
    return fingerprint(deal(experiment, dataset))


def keep_inputs(folder: Path, inputs: Inputs) -> None:
    """Note in a run's folder what it is made from, unless that is known."""
    if not (folder / INPUTS).is_file():
        write_atomically(folder / INPUTS, _DOCUMENT.dump_json(inputs, indent=2))


def require_inputs(folder: Path, inputs: Inputs, mend: str | None = None) -> None:
    """Do nothing if a run is there that was made from these, or none, or an old one.

    A split is compared where both have one.

    Parameters
    ----------
    folder
        Of the run.
    inputs
        What there is now.
    mend
        What to do other than to bring back what there was; by default to delete the
        runs of the batch.

    Raises
    ------
    RunError
        If it was made from others, or the file is damaged.
    """
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


def _file_digest(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(
            f"{path} cannot be read, expected a file of weights: {error}"
        ) from error


def read_inputs(folder: Path) -> Inputs | None:
    """Return what a run's folder says that it was made from; None where it does not.

    Raises
    ------
    RunError
        If the file is damaged.
    """
    path = folder / INPUTS
    if not path.is_file():
        return None
    try:
        return _DOCUMENT.validate_json(path.read_bytes())
    except ValidationError as error:
        raise RunError(
            f"{path} is damaged; delete {path.parent} to make the run anew: {error}"
        ) from error


def _shown(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
