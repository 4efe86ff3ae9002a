"""Arrays in files that NumPy saved, read without pickle."""

import zipfile
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knnper.config.errors import DataError

Array = NDArray[np.generic]


def load_arrays(path: Path, names: Collection[str]) -> dict[str, Array]:
    """Return those arrays of an .npz file that are called like one of ``names``.

    Raises
    ------
    DataError
        If it is no .npz file, or damaged, or holds Python objects.
    """
    # Anything else would be taken for a single array, or for a pickle.
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} cannot be read as .npz: it is not an archive")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name in arrays}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _unreadable(path, "an archive") from error


def load_array(path: Path) -> Array:
    """Return the array in an .npy file.

    Raises
    ------
    DataError
        If it is damaged, or holds Python objects.
    """
    try:
        found: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _unreadable(path, "an array") from error
    return found


def _unreadable(path: Path, what: str) -> DataError:
    return DataError(
        f"{path} cannot be read as {path.suffix}: it is damaged, or not {what} of "
        "numbers or texts that NumPy saved"
    )
