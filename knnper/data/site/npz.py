"""A site's data as arrays in one .npz file."""

from dataclasses import dataclass
from pathlib import Path

from knnper.config.errors import DataError
from knnper.data.array_file import load_arrays
from knnper.data.site.agreement import SiteTask
from knnper.data.site.arrays import KEYS, collect_arrays
from knnper.data.site.collected import Collected, SiteSettings
from knnper.data.site.place import place_of


@dataclass(frozen=True)
class NpzSettings(SiteSettings):
    """Where the file is.

    Attributes
    ----------
    path
        A file with the arrays that `collect_arrays` describes: ``inputs`` and
        ``labels``, or ``train_inputs``, ``train_labels`` and so on.
    """

    path: str


def collect_npz(
    settings: NpzSettings,
    base: Path,
    task: SiteTask | None,  # noqa: ARG001 - the signature of every reader
) -> Collected:
    """Return the examples in an .npz file.

    Raises
    ------
    DataError
        If there is no such file, it is damaged, or laid out otherwise.
    """
    path = place_of(base, settings.path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; give the path of an .npz file")
    return collect_arrays(load_arrays(path, KEYS), str(path))
