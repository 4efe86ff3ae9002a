"""Where LEAF's files lie."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from knnper.config.errors import DataError
from knnper.data.cache_entry import Split

_SPLITS: tuple[Split, ...] = ("train", "test")
_LAYOUT = (
    "expected ROOT/train/*.json and ROOT/test/*.json, or ROOT/all_data/*.json, in "
    "data.root or in its folder data"
)


@dataclass(frozen=True)
class LeafFiles:
    """The files of one data set, in the order of their names.

    Attributes
    ----------
    root
        What `divided` and `whole` are below.
    divided
        The files of both splits, where LEAF has made them.
    whole
        Else those of all users' samples.
    """

    root: Path
    divided: Mapping[Split, tuple[Path, ...]]
    whole: tuple[Path, ...]

    def fingerprint(self) -> str:
        """Return a digest of all relative paths, sizes and times of modification."""
        digest = hashlib.sha256()
        for path in (
            *self.whole,
            *(one for few in self.divided.values() for one in few),
        ):
            status = path.stat()
            name = path.relative_to(self.root)
            line = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def find_leaf_files(root: Path) -> LeafFiles:
    """Return the files below ``root``, or else those below ``root/data``.

    Where there is a split that LEAF has made, it is taken; else ``all_data``, or the
    files that lie in ``root`` itself.

    Raises
    ------
    DataError
        If there are none, or only one of the two splits.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; {_LAYOUT}")
    for base in (root, root / "data"):
        divided = {split: _json_files(base / split) for split in _SPLITS}
        if any(divided.values()):
            _require_both(base, divided)
            return LeafFiles(base, divided, ())
        whole = _json_files(base / "all_data") or _json_files(base)
        if whole:
            return LeafFiles(base, {}, whole)
    raise DataError(f"there are no .json files of LEAF in {root}; {_LAYOUT}")


def _json_files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(one for one in folder.glob("*.json") if _is_visible_file(one)))


def _is_visible_file(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def _require_both(base: Path, divided: Mapping[Split, tuple[Path, ...]]) -> None:
    for split, files in divided.items():
        if not files:
            raise DataError(
                f"there are no .json files in {base / split}, but there are in the "
                f"other split; {_LAYOUT}"
            )
