"""A client's state folder: its places, its locks, and what can go wrong with it."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples
from knnper.datastore.prediction import ClassPrior, KernelName
from knnper.datastore.store import read_identity
from knnper.datastore.tuning import EvidenceKind
from knnper.errors import KnnPerError
from knnper.files import (
    FileLock,
    ForeignFileError,
    make_private,
    parse_json,
    read_plain,
    require_plain,
    sync_to_disc,
    write_atomically,
)
from knnper.reasons import Code, SafeReason


class SiteStateError(KnnPerError):
    """A client's state folder is another's, is damaged, or holds nothing to serve."""

    reasons = (SafeReason(Code.UNUSABLE_STATE),)


MAY_BE_LINKS = ("store", "cache", "flwr", "token")
"""Entries of a state folder that its owner may have put elsewhere; a store's own folder
is looked at when it is opened."""
_Identity = dict[str, str | None]
_IDENTITY = TypeAdapter(_Identity)


class Places:
    """The parts of a client's state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity = folder / "identity.json"  # whose folder it is
        self.models = folder / "models"  # a folder each, by fingerprint
        self.store = folder / "store"  # the client's memory
        self.offered = folder / "offered.json"  # what the memory was ever given
        self.serving = folder / "serving.json"  # what is served
        self.pending = folder / "next"  # what is to be served next
        self.drafts = folder / ".drafts"  # what a kill leaves there is of no use

    def model(self, fingerprint: str) -> Path:
        """Return the folder of one model."""
        return self.models / fingerprint

    # Both locks go with the process, however that ends.
    def installing(self) -> FileLock:
        """Return a block that one process at a time is in: whoever installs."""
        return FileLock(self.folder / "installing.lock", wait=True)

    def committing(self) -> FileLock:
        """Return a block that one process at a time is in, and never for long."""
        return FileLock(self.folder / "committing.lock", wait=True)


def claim(
    places: Places,
    name: str,
    key_sha256: str | None,
    replaced: Collection[str] = (),
) -> None:
    """Make the folder that of a client, or refuse it.

    ``replaced``: Fingerprints of earlier keys of this client.
    """
    try:
        make_private(places.folder)
        with places.committing():
            known = require_own(places, name, key_sha256, replaced)
            wanted = {"name": name, "key_sha256": key_sha256 or known.get("key_sha256")}
            if wanted != known:
                write_atomically(places.identity, json.dumps(wanted))
    except ForeignFileError:
        raise
    except OSError as error:
        raise SiteStateError(
            f"{places.folder} cannot be written ({error}); give this user the right to "
            "write there, or set another `state` in the client's file"
        ) from error


def require_own(
    places: Places,
    name: str,
    key_sha256: str | None,
    replaced: Collection[str] = (),
) -> _Identity:
    """Return whose folder it is; refuse another client's. Nothing is written."""
    require_plain(places.folder, but=MAY_BE_LINKS)
    known: _Identity = {}
    with contextlib.suppress(FileNotFoundError):
        try:
            known = _IDENTITY.validate_json(read_plain(places.identity))
        except ValidationError as error:
            mend = f"remove it if {places.folder} is this client's"
            raise SiteStateError(f"{places.identity} is damaged; {mend}") from error
    if known.get("name", name) != name:
        raise SiteStateError(
            f"{places.folder} is the state of the client {known['name']!r}, found the "
            f"name {name!r}; give every client a `state` folder of its own"
        )
    key = known.get("key_sha256")
    if None not in (key, key_sha256) and key not in (key_sha256, *replaced):
        raise SiteStateError(
            f"{places.folder} is the state of the client {name!r} with the key "
            f"{str(key)[:12]}, found the key {str(key_sha256)[:12]}; bring the key "
            "back. If it was replaced (knnper fed rotate-key), copy the new key's file "
            ".replaces, too; for a key of your own remove identity.json there once it "
            "is registered"
        )
    return known


_DIGITS = 24  # of SHA-256: names themselves may tell of whoever was deleted


class Offered:
    """The names that were offered to the store that is there."""

    def __init__(self, places: Places) -> None:
        self._path = places.offered
        self._store_id = read_identity(places.store).store_id
        self._digests: set[str] = set()
        try:
            document = parse_json(read_plain(self._path))
            # Of a store that was removed nothing is remembered.
            if document["store"] == self._store_id:
                self._digests = set(document["names"])
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            raise SiteStateError(
                f"{self._path} is damaged; remove it, after which examples that were "
                "deleted from the store are added again if they are in the data"
            ) from error

    def __contains__(self, name: str) -> bool:
        return _digest(name) in self._digests

    def add(self, names: Iterable[str]) -> None:
        """Note more names, for good."""
        self._digests.update(_digest(name) for name in names)
        self._write()

    def withdraw(self, names: Iterable[str]) -> None:
        """Let names come back that left only because they are tested on now."""
        self._digests.difference_update(_digest(name) for name in names)
        self._write()

    def _write(self) -> None:
        document = {"store": self._store_id, "names": sorted(self._digests)}
        write_atomically(self._path, json.dumps(document))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]


# Other than on "test", each example is looked up among all others that are stored, with
# a choice that was made without it: the validation split's, or all.
MeasuredOn = Literal["test", "validation", "leave_one_out"]


@dataclass(frozen=True)
class Accuracy:
    """Shares of a site's examples that were predicted rightly; None is not known."""

    global_model: float | None = None
    knn: float | None = None
    mixed: float | None = None
    num_examples: int | None = None
    measured_on: MeasuredOn | None = None


@dataclass(frozen=True)
class Gain:
    """What the memory adds to the global model's accuracy; None is not known.

    ``margin`` is half its interval of 95 % (Agresti and Min 2005, matched proportions).
    """

    expected: float | None = None
    margin: float | None = None
    num_examples: int = 0

    @property
    def is_loss(self) -> bool:
        """Whether mixing is worse than the global model beyond doubt."""
        if self.expected is None or self.margin is None:
            return False
        return self.expected + self.margin < 0


@dataclass(frozen=True)
class TunedOn:
    """On what λ, k, σ and the class prior were chosen."""

    evidence: EvidenceKind
    num_examples: int
    overruled: bool = False  # not served, since it was found to lose


@dataclass(frozen=True)
class Serving:
    """A model, and how a client mixes it with its memory."""

    model: str
    knn_weight: float
    num_neighbors: int
    kernel: KernelName
    kernel_scale: float
    tuned_on: TunedOn
    accuracy: Accuracy
    expected_gain: Gain
    num_train: int
    num_validation: int
    num_test: int
    run: str
    installed: float
    previous: str | None = None  # the model before
    class_prior: ClassPrior | None = None
    took_part: bool | None = None  # None: as an earlier version wrote it
    format: Literal[1] = 1


_SERVING = TypeAdapter(Serving)


def read_serving(path: Path) -> Serving | None:
    """Return what the file says; None without a file."""
    try:
        return _SERVING.validate_json(read_plain(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise SiteStateError(
            f"{path} is damaged or of another version ({error.error_count()} problems"
            "); remove it, and get the model again: knnper site onboard"
        ) from error


def write_serving(path: Path, serving: Serving) -> None:
    """Write it down, atomically."""
    write_atomically(path, _SERVING.dump_json(serving, indent=2))


_PENDING_SERVING, _EXAMPLES = "serving.json", "examples.safetensors"


@dataclass(frozen=True, eq=False)
class Pending:
    """An installation that is prepared."""

    serving: Serving
    new: NamedExamples
    moved: tuple[str, ...] = ()
    # Of what is new, by the model that is to be served; None of an earlier version.
    embeddings: Tensor | None = None


def write_pending(places: Places, pending: Pending) -> None:
    """Write it down in place of any other; called inside `Places.committing`."""
    draft = places.pending.with_name(f".{places.pending.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    new = pending.new
    tensors = {"images": new.examples.images, "labels": new.examples.labels}
    if pending.embeddings is not None:
        tensors["embeddings"] = pending.embeddings
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    names = {"names": json.dumps(new.names), "moved": json.dumps(pending.moved)}
    write_atomically(draft / _EXAMPLES, save(tensors, names))
    write_serving(draft / _PENDING_SERVING, pending.serving)
    remove_pending(places)
    draft.rename(places.pending)
    sync_to_disc(places.folder)


def pending_serving(places: Places) -> Serving | None:
    """Return what is to be served next; None if nothing is prepared."""
    return read_serving(places.pending / _PENDING_SERVING)


def read_pending(places: Places) -> Pending | None:
    """Return what is prepared, with the examples; None if nothing is."""
    path = places.pending / _EXAMPLES
    with places.committing():
        serving = pending_serving(places)
        if serving is None:
            return None
        try:
            with safe_open(path, framework="pt") as file:
                images, labels = (file.get_tensor(one) for one in ("images", "labels"))
                is_embedded = "embeddings" in file.keys()  # noqa: SIM118 (no mapping)
                embeddings = file.get_tensor("embeddings") if is_embedded else None
                said = file.metadata()
            # A former version wrote no names of what has moved.
            names = parse_json(said["names"])
            moved = parse_json(said.get("moved", "[]"))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise SiteStateError(
                f"{path} cannot be read ({error}); remove {places.pending}, and get "
                "the model again: knnper site onboard"
            ) from error
    examples = Examples(images, labels.to(torch.int64))
    new = NamedExamples(examples, tuple(names))
    return Pending(serving, new, tuple(moved), embeddings)


def remove_pending(places: Places) -> None:
    """Remove what is prepared, as a whole; called inside `Places.committing`."""
    gone = places.pending.with_name(f".{places.pending.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if places.pending.exists():
        places.pending.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
