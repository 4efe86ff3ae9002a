"""What is to be served next, with the examples that the store still lacks."""

import json
import shutil
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from client.residence.errors import ResidenceError
from client.residence.places import Places
from client.residence.serving import Serving, read_serving, write_serving
from knnper.data.examples import Examples
from knnper.data.site.site_data import NamedExamples
from knnper.durable_files import sync_folder, write_atomically

_SERVING, _EXAMPLES = "serving.json", "examples.safetensors"
_NAMES, _MOVED = "names", "moved"


@dataclass(frozen=True, eq=False)
class Pending:
    """An installation that is prepared.

    Attributes
    ----------
    serving
        What is served when it is done.
    new
        What is added to the store first.
    moved
        The owner's names of what leaves the store before: they are in the test split.
    """

    serving: Serving
    new: NamedExamples
    moved: tuple[str, ...] = ()


def write_pending(places: Places, pending: Pending) -> None:
    """Write it down in place of any other; called inside `Places.committing`."""
    draft = places.pending.with_name(f".{places.pending.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    examples = pending.new.examples
    tensors = {
        "images": examples.images.contiguous(),
        "labels": examples.labels.contiguous(),
    }
    names = {
        _NAMES: json.dumps(pending.new.names),
        _MOVED: json.dumps(pending.moved),
    }
    write_atomically(draft / _EXAMPLES, save(tensors, names))
    write_serving(draft / _SERVING, pending.serving)
    remove_pending(places)
    draft.rename(places.pending)
    sync_folder(places.folder)


def pending_serving(places: Places) -> Serving | None:
    """Return what is to be served next; None if nothing is prepared."""
    return read_serving(places.pending / _SERVING)


def read_pending(places: Places) -> Pending | None:
    """Return what is prepared, with the examples; None if nothing is.

    Raises
    ------
    ResidenceError
        If it cannot be read.
    """
    with places.committing():
        serving = pending_serving(places)
        return None if serving is None else Pending(serving, *_examples(places))


def remove_pending(places: Places) -> None:
    """Remove what is prepared, as a whole; called inside `Places.committing`."""
    gone = places.pending.with_name(f".{places.pending.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if places.pending.exists():
        places.pending.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _examples(places: Places) -> tuple[NamedExamples, tuple[str, ...]]:
    """Return what is new, and the names of what has moved."""
    path = places.pending / _EXAMPLES
    try:
        with safe_open(path, framework="pt") as file:
            images, labels = (file.get_tensor(one) for one in ("images", "labels"))
            said = file.metadata()
        # A former version wrote no names of what has moved.
        names, moved = json.loads(said[_NAMES]), json.loads(said.get(_MOVED, "[]"))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ResidenceError(
            f"{path} cannot be read ({error}); remove {places.pending}, and get the "
            "model again: knnper onboard"
        ) from error
    examples = Examples(images, labels.to(torch.int64))
    return NamedExamples(examples, tuple(names)), tuple(moved)
