"""Image files that are decoded once; later processes memory-map the result."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from knnper.data.image_file import DECODER
from knnper.data.site.agreement import SiteTask
from knnper.data.site.collected import InputForm, Inputs, ReadInputs
from knnper.data.whole_entry import (
    UNFINISHED,
    alone,
    make_entry,
    read_if_sound,
    sync_to_disc,
)

_LOG = logging.getLogger(__name__)

_FORMAT = 1
_ARRAY = "images.npy"
_MOST_FORMS = 3
# Longer than a tick of the clocks that file systems take their times from.
_TICK_NS = 50_000_000


class FileInputs(Inputs, Protocol):
    """Inputs of which each lies in a file."""

    def paths(self) -> Iterator[str]:
        """Yield the file of each input."""


@dataclass(frozen=True, eq=False)
class DecodedFiles:
    """The inputs in files, which are decoded only if this was not done before.

    Attributes
    ----------
    files
        The inputs.
    folder
        Where decoded ones are kept, readable by this user alone. It should be of no
        other use. Where it cannot be written, inputs are decoded each time.

    Notes
    -----
    An entry belongs to the path, size, and times of modification and change of *each*
    file, and to the decoder, the form and the order of what was asked for. When a file
    is new, gone or another, all entries are removed. Otherwise the three that were
    last used are kept, so that tasks with different forms can take turns. Inputs of
    which some cannot be read are not kept: the reason may lie outside of the files.
    """

    files: FileInputs
    folder: Path

    def form(self) -> InputForm:
        """See `knnper.data.site.collected.Inputs`."""
        return self.files.form()

    def kept_in(self, folder: Path) -> "DecodedFiles":
        """See `knnper.data.site.collected.Inputs`."""
        return DecodedFiles(self.files, folder)

    def read(self, positions: Sequence[int], task: SiteTask) -> ReadInputs:
        """See `knnper.data.site.collected.Inputs`.

        What comes from an entry is a private map: it can be written to, which changes
        neither the entry nor what others see.
        """
        listing = _list(self.files.paths())
        entry = self.folder / f"{listing.digest}-{_form(positions, task)}"
        kept = _kept(entry, positions, task)
        if kept is not None:
            return kept
        with self._alone() as is_alone:
            if not is_alone:
                return self.files.read(positions, task)
            kept = _kept(entry, positions, task)
            if kept is not None:
                return kept
            _tidy(self.folder, listing.digest)
            listing.wait_a_tick()
            read = self.files.read(positions, task)
            if not read.unreadable:
                _keep(entry, read.images)
            return read

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Be the only one who decodes; False where the folder cannot be written."""
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.folder.chmod(0o700)
                stack.enter_context(alone(self.folder / "lock"))
            except OSError as error:
                _LOG.warning("inputs are decoded without a cache: %s", error)
                yield False
            else:
                yield True


@dataclass(frozen=True)
class _Listing:
    """The state of all files: a digest, and when the last one changed."""

    digest: str
    changed_ns: int

    def wait_a_tick(self) -> None:
        """Let time pass until another change would be told by another time."""
        left = self.changed_ns + _TICK_NS - time.time_ns()
        if 0 < left <= _TICK_NS:
            time.sleep(left / 1e9)


def _list(paths: Iterator[str]) -> _Listing:
    digest, changed_ns = hashlib.sha256(), 0
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - 50,000 files
        except OSError:
            digest.update(f"{path}\0none\0".encode("utf-8", "surrogateescape"))
            continue
        # A file that was moved over another may have the same size and time of
        # modification, but was changed by the move.
        times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
        line = f"{path}\0{status.st_size}\0{times}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
        changed_ns = max(changed_ns, status.st_ctime_ns)
    return _Listing(digest.hexdigest()[:32], changed_ns)


def _form(positions: Sequence[int], task: SiteTask) -> str:
    digest = hashlib.sha256(json.dumps([_FORMAT, DECODER, _shape(0, task)]).encode())
    digest.update(np.asarray(positions, dtype="<i8").tobytes())
    return digest.hexdigest()[:32]


def _shape(count: int, task: SiteTask) -> tuple[int, ...]:
    return (count, *task.spec.image_shape)


def _kept(entry: Path, positions: Sequence[int], task: SiteTask) -> ReadInputs | None:
    images = read_if_sound(entry, lambda folder: _map(folder, len(positions), task))
    return None if images is None else ReadInputs(images)


def _map(entry: Path, count: int, task: SiteTask) -> Tensor:
    """Return the images of an entry, and note that it was used."""
    images = np.load(entry / _ARRAY, mmap_mode="c", allow_pickle=False)
    expected = _shape(count, task)
    if images.shape != expected or images.dtype != np.uint8:
        raise ValueError(
            f"found {images.dtype} of shape {images.shape}, expected uint8 of shape "
            f"{expected}"
        )
    with contextlib.suppress(OSError):
        os.utime(entry)
    return torch.from_numpy(images)


def _keep(entry: Path, images: Tensor) -> None:
    """Make the entry, if there is room."""

    def fill(folder: Path) -> None:
        # Not into a map: on a full disc that would kill the process.
        np.save(folder / _ARRAY, images.numpy())
        sync_to_disc(folder / _ARRAY)
        sync_to_disc(folder)

    try:
        make_entry(entry, fill)
    except OSError as error:
        _LOG.warning("decoded inputs are not kept in %s: %s", entry, error)


def _tidy(folder: Path, listing: str) -> None:
    """Remove what is of no use any more, and leave room for one more entry."""
    entries = [one for one in folder.iterdir() if one.is_dir()]
    useful = [
        one
        for one in entries
        if one.name.startswith(listing) and not one.name.endswith(UNFINISHED)
    ]
    useful.sort(key=lambda one: one.stat().st_mtime_ns)
    for one in set(entries).difference(useful[-(_MOST_FORMS - 1) :]):
        shutil.rmtree(one, ignore_errors=True)
