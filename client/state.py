"""A client's state folder: its files, its locks, and the records in it."""

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
from knnper.datastore.class_prior import ClassPrior
from knnper.datastore.memory import EvidenceKind
from knnper.datastore.prediction import KernelName
from knnper.datastore.store import read_identity
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

# Entries of a state folder that its owner may have linked elsewhere. A store's own
# folder is checked when the store is opened.
MAY_BE_LINKS = ("store", "cache", "flwr", "token")
_NAME_DIGITS = 24  # of SHA-256: names themselves could reveal who was deleted
_PENDING_SERVING = "serving.json"
_PENDING_EXAMPLES = "examples.safetensors"
_Identity = dict[str, str | None]
_IDENTITY = TypeAdapter(_Identity)

# How an accuracy was measured. On "test" the test split is predicted. Otherwise each
# example is predicted from all others that are stored, with hyper-parameters chosen
# without it: the examples of the validation split, or ("leave_one_out") all of them.
MeasuredOn = Literal["test", "validation", "leave_one_out"]


class SiteStateError(KnnPerError):
    """A state folder is another client's, is damaged, or holds nothing to serve."""

    reasons = (SafeReason(Code.UNUSABLE_STATE),)


class StateFolder:
    """Paths and locks of a client's state folder.

    Attributes
    ----------
    identity
        Name of the client, and the fingerprint of its key.
    models
        Exported models, one folder each, named by fingerprint.
    store
        The client's memory.
    offered
        Names of the examples that were ever offered to the memory.
    serving
        The model that is served, and its hyper-parameters.
    pending
        An installation that is prepared and not finished.
    drafts
        Unfinished files, of no use after a kill.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = path / "identity.json"
        self.models = path / "models"
        self.store = path / "store"
        self.offered = path / "offered.json"
        self.serving = path / "serving.json"
        self.pending = path / "next"
        self.drafts = path / ".drafts"

    def model(self, fingerprint: str) -> Path:
        """Return the folder of one model."""
        return self.models / fingerprint

    # The kernel releases both locks when the process ends.
    def installing(self) -> FileLock:
        """Return the lock held by the one process that installs a model."""
        return FileLock(self.path / "installing.lock", wait=True)

    def committing(self) -> FileLock:
        """Return the lock held for the short time of changing several files."""
        return FileLock(self.path / "committing.lock", wait=True)


def claim(
    folder: StateFolder,
    name: str,
    key_sha256: str | None,
    replaced: Collection[str] = (),
) -> None:
    """Record the client as owner of a state folder; reject another client's folder.

    Parameters
    ----------
    key_sha256
        Fingerprint of the client's key, if it has one.
    replaced
        Fingerprints of earlier keys of this client.
    """
    try:
        make_private(folder.path)
        with folder.committing():
            known = require_own(folder, name, key_sha256, replaced)
            identity = {
                "name": name,
                "key_sha256": key_sha256 or known.get("key_sha256"),
            }
            if identity != known:
                write_atomically(folder.identity, json.dumps(identity))
    except ForeignFileError:
        raise
    except OSError as error:
        raise SiteStateError(
            f"{folder.path} cannot be written ({error}); give this user the right to "
            "write there, or set another `state` in the client's file"
        ) from error


def require_own(
    folder: StateFolder,
    name: str,
    key_sha256: str | None,
    replaced: Collection[str] = (),
) -> _Identity:
    """Reject another client's state folder; return the recorded owner.

    Nothing is written. The owner is empty for a new folder.
    """
    require_plain(folder.path, but=MAY_BE_LINKS)
    known: _Identity = {}
    with contextlib.suppress(FileNotFoundError):
        try:
            known = _IDENTITY.validate_json(read_plain(folder.identity))
        except ValidationError as error:
            raise SiteStateError(
                f"{folder.identity} is damaged; remove it if {folder.path} is this "
                "client's"
            ) from error
    if known.get("name", name) != name:
        raise SiteStateError(
            f"{folder.path} is the state of the client {known['name']!r}, found the "
            f"name {name!r}; give every client a `state` folder of its own"
        )
    key = known.get("key_sha256")
    if None not in (key, key_sha256) and key not in (key_sha256, *replaced):
        raise SiteStateError(
            f"{folder.path} is the state of the client {name!r} with the key "
            f"{str(key)[:12]}, found the key {str(key_sha256)[:12]}; bring the key "
            "back. If it was replaced (knnper fed rotate-key), copy the new key's file "
            ".replaces, too; for a key of your own remove identity.json there once it "
            "is registered"
        )
    return known


class Offered:
    """Names of the examples that were ever offered to the present store.

    An example that was offered and is not stored was deleted or evicted, and is not
    added again. Names are kept as hashes.
    """

    def __init__(self, folder: StateFolder) -> None:
        self._path = folder.offered
        self._store_id = read_identity(folder.store).store_id
        self._digests: set[str] = set()
        try:
            document = parse_json(read_plain(self._path))
            # The names of a store that was removed do not count.
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
        """Add names; they are on disk on return."""
        self._digests.update(_digest(name) for name in names)
        self._write()

    def withdraw(self, names: Iterable[str]) -> None:
        """Remove the names of examples that may be offered again."""
        self._digests.difference_update(_digest(name) for name in names)
        self._write()

    def _write(self) -> None:
        document = {"store": self._store_id, "names": sorted(self._digests)}
        write_atomically(self._path, json.dumps(document))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]


@dataclass(frozen=True)
class Accuracy:
    """Fractions of a site's examples that were predicted correctly; None if unknown."""

    global_model: float | None = None
    knn: float | None = None
    mixed: float | None = None
    num_examples: int | None = None
    measured_on: MeasuredOn | None = None


@dataclass(frozen=True)
class Gain:
    """Expected gain in accuracy over the global model; None if unknown.

    ``margin`` is half the width of the 95 % interval (Agresti and Min 2005, matched
    proportions).
    """

    expected: float | None = None
    margin: float | None = None
    num_examples: int = 0

    @property
    def is_loss(self) -> bool:
        """Whether mixing is worse than the global model, at 95 % confidence."""
        if self.expected is None or self.margin is None:
            return False
        return self.expected + self.margin < 0


@dataclass(frozen=True)
class TunedOn:
    """Examples on which λ, k, σ and the class prior were chosen.

    ``overruled``: the choice is not served, because it would lose accuracy.
    """

    evidence: EvidenceKind
    num_examples: int
    overruled: bool = False


@dataclass(frozen=True)
class Serving:
    """The model that is served, how it is mixed with the memory, and its figures.

    Attributes
    ----------
    model, previous
        Fingerprints of this model and of the one before.
    run, installed
        Name of the experiment, and the time of installation (seconds since 1970).
    took_part
        Whether the model may have been trained on this site's training split.
    """

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
    previous: str | None = None
    class_prior: ClassPrior | None = None
    took_part: bool = False
    format: Literal[1] = 1


_SERVING = TypeAdapter(Serving)


def read_serving(path: Path) -> Serving | None:
    """Read a serving file; return None if there is none."""
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
    """Write a serving file atomically."""
    write_atomically(path, _SERVING.dump_json(serving, indent=2))


@dataclass(frozen=True, eq=False)
class Pending:
    """An installation that is prepared and not finished.

    Attributes
    ----------
    serving
        The model to serve.
    new
        Examples to add to the store.
    embeddings
        Their embeddings by that model, float32 (n, p).
    leaving
        Names of the examples to delete from the store.
    """

    serving: Serving
    new: NamedExamples
    embeddings: Tensor
    leaving: tuple[str, ...] = ()


def write_pending(folder: StateFolder, pending: Pending) -> None:
    """Replace the pending installation; call it inside `StateFolder.committing`."""
    draft = folder.pending.with_name(f".{folder.pending.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    tensors = {
        "images": pending.new.examples.images.contiguous(),
        "labels": pending.new.examples.labels.contiguous(),
        "embeddings": pending.embeddings.contiguous(),
    }
    metadata = {
        "names": json.dumps(pending.new.names),
        "moved": json.dumps(pending.leaving),
    }
    write_atomically(draft / _PENDING_EXAMPLES, save(tensors, metadata))
    write_serving(draft / _PENDING_SERVING, pending.serving)
    remove_pending(folder)
    draft.rename(folder.pending)
    sync_to_disc(folder.path)


def pending_serving(folder: StateFolder) -> Serving | None:
    """Read which model is to be served next; return None if none is pending."""
    return read_serving(folder.pending / _PENDING_SERVING)


def read_pending(folder: StateFolder) -> Pending | None:
    """Read the pending installation with its examples; return None if there is none."""
    path = folder.pending / _PENDING_EXAMPLES
    with folder.committing():
        serving = pending_serving(folder)
        if serving is None:
            return None
        try:
            with safe_open(path, framework="pt") as file:
                images, labels, embeddings = (
                    file.get_tensor(name) for name in ("images", "labels", "embeddings")
                )
                metadata = file.metadata()
            names = parse_json(metadata["names"])
            leaving = parse_json(metadata["moved"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise SiteStateError(
                f"{path} cannot be read ({error}); remove {folder.pending}, and get "
                "the model again: knnper site onboard"
            ) from error
    new = NamedExamples(Examples(images, labels.to(torch.int64)), tuple(names))
    return Pending(serving, new, embeddings, tuple(leaving))


def remove_pending(folder: StateFolder) -> None:
    """Remove the pending installation; call it inside `StateFolder.committing`."""
    removed = folder.pending.with_name(f".{folder.pending.name}.gone")
    shutil.rmtree(removed, ignore_errors=True)
    if folder.pending.exists():
        # Renamed first: a kill leaves it either whole or under a name that is not read.
        folder.pending.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
