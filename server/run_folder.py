"""What a run keeps in its folder: its settings, clients, checkpoints and results."""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import uuid
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json
from safetensors import SafetensorError
from safetensors.torch import load_file, save

import knnper
from knnper.errors import (
    CheckpointError,
    CodecError,
    ConfigError,
    FolderTakenError,
    Problem,
    RunError,
)
from knnper.experiment import (
    Catalogue,
    Experiment,
    read_experiment,
    results_identity,
    to_yaml,
)
from knnper.files import (
    FileLock,
    JsonLines,
    LockHeldError,
    draft_of,
    lock_holder,
    open_plain,
    parse_json,
    require_plain,
    sync_to_disc,
    write_atomically,
)
from knnper.records import Parts, canonical, fingerprint, put_together, take_apart
from knnper.server.result_files import results_problem, round_problem
from knnper.server.results import with_present_names, write_clients_csv
from knnper.server.screening import Norms, is_near_lowest
from knnper.server.traces import digests
from knnper.strategies.core.task import ClientResult

log = logging.getLogger(__name__)
FORMAT = 2  # of checkpoints
_WITHOUT_CHECKSUM = 1  # the format of version 0.1.0, which is still read
KEPT = 6  # checkpoints that are kept where nothing else is said
_NAME = re.compile(r"round-(\d+)")
_ASIDE = re.compile(r"aside-(\d+)-after-(\d+)")
_TENSORS = "state.safetensors"
_MANIFEST = "manifest.json"
_CHECKSUM = "manifest.sha256"  # in hexadecimal, of a checkpoint's manifest
_EARLIER = "earlier"  # in a checkpoint's: what is told of each `Checkpoint.earlier`
_TRACES = "traces"  # in the manifest: SHA-256 by file
_GAINS, _NUM_GAINS = "gains.jsonl", "num_gains"  # in the manifest, of how many rounds
_GAINS_SHA256 = "gains_sha256"  # in the manifest, see `_digest_of`
OWN_CODE = "own_code"  # in the manifest: fingerprints by reference
_DAMAGE = (OSError, ValueError, KeyError, TypeError, CodecError, SafetensorError)


@dataclass(frozen=True)
class History:
    """What the rounds so far tell of the next: the loop's part of a checkpoint."""

    norms: Mapping[str, Norms] = field(default_factory=dict)
    lowest_loss: float | None = None
    trained_in: Mapping[str, int] | None = None
    # By client, of each round from the first; none where clients are drawn uniformly.
    gains: Sequence[Mapping[str, float]] = field(default_factory=list)
    # Of the last rounds over real clients: see `knnper.server.suspects.agreements`.
    agreements: Sequence[Mapping[str, float]] = field(default_factory=list)
    # Clients without whom an exploded training was made again: after which round they
    # are left out, and their mean cosine with the others.
    left_out: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # The last round that began with about as good a model as any; None is not known.
    good_round: int | None = None

    def after(
        self,
        server_round: int,
        norms: Mapping[str, Norms],
        loss: float | None,
        used: Collection[str],
    ) -> "History":
        """Return what is known after one more round."""
        lowest, trained_in = self.lowest_loss, self.trained_in
        good_round = self.good_round
        if loss is not None:
            lowest = loss if lowest is None else min(loss, lowest)
            good_round = server_round if is_near_lowest(loss, lowest) else good_round
        if trained_in is not None:
            trained_in = _updated(trained_in, dict.fromkeys(used, server_round))
        return replace(
            self,
            norms=norms,
            lowest_loss=lowest,
            good_round=good_round,
            trained_in=trained_in,
        )

    def state_rounds(self, clients: Sequence[str], last_round: int) -> tuple[int, ...]:
        """Return after which round each client goes on; 0 is from the start."""
        if self.trained_in is None:
            return (last_round,) * len(clients)
        return tuple(self.trained_in.get(client, 0) for client in clients)


_FEW = 16


def _updated(known: Mapping[str, int], more: Mapping[str, int]) -> Mapping[str, int]:
    """Return both, which stay as they are; ``more`` has precedence.

    What came last is apart until it is a sixteenth of all: a round of a thousand
    clients does not copy what is known of a million.
    """
    latest, rest = known.maps if isinstance(known, ChainMap) else ({}, known)
    recent = {**latest, **more}
    if _FEW * len(recent) < len(rest):
        return ChainMap(recent, rest if isinstance(rest, dict) else dict(rest))
    return {**rest, **recent}


def _plain_history(history: History) -> dict[str, Any]:
    """Return what a manifest has of it: of ``gains``, which have a file, the number."""
    trained_in = history.trained_in
    if isinstance(trained_in, ChainMap):  # whose own way to a dictionary is long
        recent, rest = trained_in.maps
        trained_in = {**rest, **recent}
    norms = {name: vars(one) for name, one in history.norms.items()}
    return {
        "norms": norms,
        "lowest_loss": history.lowest_loss,
        "good_round": history.good_round,
        "trained_in": trained_in,
        _NUM_GAINS: len(history.gains),
        # Of runs over real clients alone.
        **({"agreements": history.agreements} if history.agreements else {}),
        **({"left_out": history.left_out} if history.left_out else {}),
    }


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round."""

    server_round: int
    state: Any
    fingerprint: str
    history: History = field(default_factory=History)
    earlier: Sequence["Checkpoint"] = ()  # of models with which clients still train


def rounds_in(folder: Path) -> list[int]:
    """Return the rounds of which ``folder`` has a checkpoint, oldest first."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("*"))
    return sorted(int(match[1]) for match in matches if match)


def checkpoint_of(folder: Path, server_round: int) -> Path:
    """Return where ``folder`` has the checkpoint of a round."""
    return folder / f"round-{server_round:06d}"


def asides(folder: Path) -> dict[Path, int]:
    """Return the folders of what was put aside, oldest first, and after which round."""
    matches = {path: _ASIDE.fullmatch(path.name) for path in sorted(folder.glob("*"))}
    return {path: int(match[2]) for path, match in matches.items() if match}


def put_aside(folder: Path, server_round: int, files: Iterable[Path]) -> None:
    """Move the checkpoints after a round to a folder in ``folder``; copy ``files``."""
    earlier = (_ASIDE.fullmatch(path.name) for path in asides(folder))
    number = 1 + max((int(match[1]) for match in earlier if match), default=0)
    aside = folder / f"aside-{number:03d}-after-{server_round:06d}"
    aside.mkdir()
    for file in files:
        shutil.copyfile(file, aside / file.name)
    # The newest first: what is left at any time is a run to resume.
    for later in reversed(rounds_in(folder)):
        if later > server_round:
            path = checkpoint_of(folder, later)
            path.rename(aside / path.name)
    sync_to_disc(folder)


def to_keep(rounds: Sequence[int], most: int) -> list[int]:
    """Return which of the rounds are kept, oldest first, where only so many are.

    The newest two, and of those that 2, 4, 8, ... divide the newest two again, so that
    each is about twice as far back as the next one. Where these are fewer, the newest
    of the others too.
    """
    kept = set(rounds[-1:])
    for power in range(most - 1):
        kept.update([one for one in rounds if one % 2**power == 0][-2:])
    others = [one for one in reversed(rounds) if one not in kept]
    return sorted([*kept, *others[: most - len(kept)]])


class CheckpointFolder:
    """The newest checkpoints of a run, and older ones at growing distances."""

    def __init__(self, folder: Path, experiment: str, most: int = KEPT) -> None:
        self._folder = folder
        self._experiment = experiment
        self._most = most
        # Of the checkpoint written last: each state's file, and what is told of it.
        self._written: dict[int, tuple[Path, dict[str, Any]]] = {}
        # A line a round: in each checkpoint they would grow with the square of rounds.
        self._gains = JsonLines(folder / _GAINS)
        self._num_gains: int | None = None  # that are there; None if it is not known
        self._gains_digest = hashlib.sha256()

    @property
    def waiting(self) -> Path:
        """Where updates of a round may wait on disk."""
        return self._folder / ".waiting"

    def save(
        self,
        server_round: int,
        state: object,
        history: History | None = None,
        earlier: Iterable[Checkpoint] = (),
    ) -> Checkpoint:
        """Write a checkpoint; it is complete on disk, or not there, at any time.

        ``earlier``: Those whose states it cannot go on without, and so holds too.
        """
        known = history or History()
        found = fingerprint(state)
        saved = Checkpoint(server_round, state, found, known, tuple(earlier))
        self._keep(known.gains)
        self._write(saved)
        rounds = self.rounds()
        for old in set(rounds) - set(to_keep(rounds, self._most)):
            shutil.rmtree(self._path(old), ignore_errors=True)
        return saved

    def _keep(self, gains: Sequence[Mapping[str, float]]) -> None:
        if not gains:
            return
        if self._num_gains is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._gains.replace(gains)
            self._gains_digest = _digest_of(gains)
        else:
            added = gains[self._num_gains :]
            self._gains.append(*added)
            self._gains_digest = _digest_of(added, self._gains_digest)
        self._num_gains = len(gains)

    def _write(self, saved: Checkpoint) -> None:
        server_round, target = saved.server_round, self._path(saved.server_round)
        draft = self._folder / f".round-{server_round}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        told = _write_state(draft / _TENSORS, saved)
        written = {server_round: (target / _TENSORS, told)}
        for one in saved.earlier:
            name = _earlier_file(one.server_round)
            file, told_of_it = self._written.get(one.server_round, (None, {}))
            if file is None or not _linked(file, draft / name):
                told_of_it = _write_state(draft / name, one)
            written[one.server_round] = target / name, told_of_it
        manifest = {
            "format": FORMAT,
            "server_round": server_round,
            "experiment": self._experiment,
            "history": _plain_history(saved.history),
            _EARLIER: {
                one.server_round: written[one.server_round][1] for one in saved.earlier
            },
            **told,
        }
        if saved.history.gains:
            manifest[_GAINS_SHA256] = self._gains_digest.hexdigest()
        content = to_json(manifest, indent=2)
        write_atomically(draft / _MANIFEST, content)
        write_atomically(draft / _CHECKSUM, hashlib.sha256(content).hexdigest())
        shutil.rmtree(target, ignore_errors=True)
        draft.replace(target)
        sync_to_disc(self._folder)
        self._written = written

    def load_latest(self, state_type: type) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; None if there is none."""
        rounds = self.rounds()
        if (latest := self._newest_whole(rounds, state_type)) is not None:
            return latest
        if rounds:
            raise CheckpointError(
                f"none of the checkpoints in {self._folder} can be read; start the "
                "experiment again in another folder"
            )
        return None

    def load_before(self, server_round: int, state_type: type) -> Checkpoint | None:
        """Return the newest whole checkpoint of an earlier round; None without one."""
        earlier = [one for one in self.rounds() if one < server_round]
        return self._newest_whole(earlier, state_type)

    def forget_after(self, server_round: int) -> None:
        """Remove the checkpoints of later rounds: they are about to be made again."""
        # The newest first: what is left at any time is a run to resume.
        for later in reversed(self.rounds()):
            if later > server_round:
                shutil.rmtree(self._path(later))
        self._written, self._num_gains = {}, None

    def _newest_whole(
        self, rounds: Sequence[int], state_type: type
    ) -> Checkpoint | None:
        for server_round in reversed(rounds):
            try:
                return self._load(server_round, state_type)
            except _DAMAGE as error:
                path = self._path(server_round)
                log.warning("the checkpoint %s is damaged: %s", path, error)
        return None

    def rounds(self) -> list[int]:
        """Return the rounds of which there is a checkpoint, oldest first."""
        return rounds_in(self._folder)

    def ways_back(self) -> list[int]:
        """Return the rounds to which a run may go back, oldest first.

        With those after which something was put aside: it may be brought back.
        """
        return sorted({*self.rounds(), *asides(self._folder).values()}) or [0]

    def _load(self, server_round: int, state_type: type) -> Checkpoint:
        path = self._path(server_round)
        manifest = _read_manifest(path)
        is_known = manifest["format"] in (_WITHOUT_CHECKSUM, FORMAT)
        if not is_known or manifest["experiment"] != self._experiment:
            raise CheckpointError(
                f"{path} belongs to another experiment or version; resume with the "
                "settings that started the run, or start in another folder"
            )
        told = manifest.get("history", {})
        norms = {name: Norms(**one) for name, one in told.pop("norms", {}).items()}
        num_gains = told.pop(_NUM_GAINS, 0)
        gains = self._gains.read()[:num_gains]
        if len(gains) < num_gains:
            raise ValueError(f"{_GAINS} has {len(gains)} rounds, expected {num_gains}")
        expected = manifest.get(_GAINS_SHA256)
        if expected is not None and _digest_of(gains).hexdigest() != expected:
            raise ValueError(f"{_GAINS} is not what was written")
        earlier = {
            int(number): _read_state(path / _earlier_file(int(number)), one, state_type)
            for number, one in dict(manifest.get(_EARLIER, {})).items()
        }
        return Checkpoint(
            server_round,
            _read_state(path / _TENSORS, manifest, state_type),
            manifest["fingerprint"],
            History(norms, gains=gains, **told),
            tuple(Checkpoint(number, one, "") for number, one in earlier.items()),
        )

    def _path(self, server_round: int) -> Path:
        return checkpoint_of(self._folder, server_round)


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest; refuse one that is not what was written."""
    content, checksum = (checkpoint / _MANIFEST).read_bytes(), checkpoint / _CHECKSUM
    if checksum.exists():
        found, expected = hashlib.sha256(content).hexdigest(), checksum.read_text()
        if found != expected:
            raise ValueError(f"{_MANIFEST} is not what was written")
    manifest: dict[str, Any] = parse_json(content)
    if manifest["format"] != _WITHOUT_CHECKSUM and not checksum.exists():
        raise ValueError(f"{_CHECKSUM} is missing")
    return manifest


def _digest_of(
    gains: Iterable[Mapping[str, float]], digest: "hashlib._Hash | None" = None
) -> "hashlib._Hash":
    """Return the SHA-256 of these lines of `_GAINS`, behind those in ``digest``."""
    digest = hashlib.sha256() if digest is None else digest
    for one in gains:
        digest.update(json.dumps(one).encode())
    return digest


def _earlier_file(server_round: int) -> str:
    return f"earlier-{server_round:06d}.safetensors"


def _linked(file: Path, link: Path) -> bool:
    """Make ``link`` the same file, which is never changed; return whether it is."""
    try:
        os.link(file, link)
    except OSError:  # not on this file system
        return False
    return True


def _write_state(file: Path, saved: Checkpoint) -> dict[str, Any]:
    """Write the tensors of a state; return what else there is to tell of it."""
    parts = take_apart(saved.state)
    tensors = {name: tensor.contiguous() for name, tensor in parts.tensors.items()}
    write_atomically(file, save(tensors))
    return {
        "fingerprint": saved.fingerprint or fingerprint(saved.state),
        "structure": json.loads(parts.structure),
    }


def _read_state(file: Path, told: Mapping[str, Any], state_type: type) -> Any:
    structure = json.dumps(told["structure"], separators=(",", ":"))
    tensors = load_file(file)
    state: object = canonical(put_together(state_type, Parts(tensors, structure)))
    found, expected = fingerprint(state), told["fingerprint"]
    if found != expected:
        raise ValueError(f"expected fingerprint {expected}, found {found}")
    return state


class CheckpointWriter(contextlib.AbstractContextManager["CheckpointWriter"]):
    """Writes checkpoints while the next round is made.

    A disc takes longer than all else between two rounds. At most one is being written,
    and none any more when the context ends.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1)
        self._begun: Future[Checkpoint] | None = None

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def save(
        self,
        server_round: int,
        state: object,
        history: History,
        earlier: Sequence[Checkpoint],
    ) -> None:
        """Begin a checkpoint; an error of the one before is raised here."""
        self.latest()
        self._begun = self._thread.submit(
            self._folder.save, server_round, state, history, earlier
        )

    def latest(self) -> Checkpoint | None:
        """Return the latest checkpoint, once it is on disk; None if there is none."""
        return None if self._begun is None else self._begun.result()


@dataclass(frozen=True, slots=True)  # there may be a million
class Member:
    """A client, and how much data it has."""

    name: str
    seen: bool
    num_train: int
    num_validation: int
    num_test: int
    is_claim: bool = False
    title: str = ""  # what results call it, where that is not its name

    @property
    def num_examples(self) -> int:
        """Examples in all splits."""
        return self.num_train + self.num_validation + self.num_test


@dataclass(frozen=True)
class Roster:
    """Who there is when a run begins, and the same until it ends."""

    members: Iterable[Member]  # sorted by name; gone through as often as needed
    split: str

    @classmethod
    def of(cls, members: Iterable[Member], split: str) -> "Roster":
        """Return the roster of ``members``, in any order."""
        return cls(tuple(sorted(members, key=lambda member: member.name)), split)

    def names(self) -> list[str]:
        """Return all clients, sorted."""
        return [member.name for member in self.members]

    def titles(self) -> dict[str, str]:
        """Return what results call clients that they do not call by their names."""
        return {one.name: one.title for one in self.members if one.title}

    def trainable(self) -> dict[str, int]:
        """Return the number of training examples of each client that may take part."""
        return {one.name: one.num_train for one in self._training()}

    def claimed(self) -> frozenset[str]:
        """Return the `trainable` clients of whose number only they know."""
        return frozenset(member.name for member in self._training() if member.is_claim)

    def num_validation(self) -> dict[str, int]:
        """Return the number of validation examples of each `trainable` client."""
        return {one.name: one.num_validation for one in self._training()}

    def sizes(self) -> dict[str, int]:
        """Return the number of examples of each client, in all splits; by name."""
        return {member.name: member.num_examples for member in self.members}

    def seen(self) -> frozenset[str]:
        """Return the clients that are not held out."""
        return frozenset(member.name for member in self.members if member.seen)

    def _training(self) -> Iterator[Member]:
        return (one for one in self.members if one.seen and one.num_train > 0)


@dataclass(frozen=True)
class _Line:
    """A client that has a model, and what it reported if it does not withhold it."""

    model: str
    client: str | None = None
    result: ClientResult | None = None


_LINE = TypeAdapter(_Line)


@dataclass(frozen=True, eq=False)
class Reported(Mapping[str, ClientResult | None]):
    """What clients that have a model reported, by name; None of who withholds it.

    A report is read when it is asked for: there may be a million.
    """

    path: Path
    places: Mapping[str, int]  # by name, where in the file
    withheld: Collection[str]

    def __getitem__(self, client: str) -> ClientResult | None:
        return next(self.of([client]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, client: object) -> bool:
        return client in self.places

    def of(self, clients: Iterable[str]) -> Iterator[ClientResult | None]:
        """Yield what these clients reported."""
        places = (self.places[client] for client in clients)
        if not self.places:
            return
        with self.path.open("rb") as file:
            for place in places:
                file.seek(place)
                yield self._result(file.readline())

    def _result(self, line: bytes) -> ClientResult | None:
        try:
            return _LINE.validate_json(line, strict=True).result
        except ValidationError as error:
            raise _no_result(self.path, error) from error


@dataclass(frozen=True)
class Shown(Iterable[ClientResult]):
    """What clients reported that do not withhold it, sorted by what they are called."""

    reported: Reported
    clients: Collection[str]
    titles: Mapping[str, str]  # what those are called that are not called by name

    def __iter__(self) -> Iterator[ClientResult]:
        def title(name: str) -> str:
            return self.titles.get(name, name)

        withheld = self.reported.withheld
        shown = sorted((one for one in self.clients if one not in withheld), key=title)
        for name, result in zip(shown, self.reported.of(shown), strict=True):
            if result is not None:
                yield replace(result, client=title(name))


def _no_result(path: Path, why: object) -> RunError:
    return RunError(
        f"a line of {path} is no client's result; remove the file and resume the run: "
        f"{why}"
    )


@dataclass(frozen=True)
class DistributionLog:
    """One line for each client that has the model."""

    path: Path

    def append(self, model: str, reports: Mapping[str, ClientResult | None]) -> None:
        """Add that clients have the model with fingerprint ``model``."""
        self._lines.append(
            *(
                {
                    "model": model,
                    **({"result": _plain(one)} if one else {"client": client}),
                }
                for client, one in reports.items()
            )
        )

    def reported(self, model: str) -> Reported:
        """Return by name what clients that have that model reported."""
        places, withheld = dict[str, int](), set[str]()
        for place, record in self._lines.placed():
            if record.get("model") == model:
                client = self._client(record)
                places[client] = place
                (withheld.discard if "result" in record else withheld.add)(client)
        return Reported(self.path, places, withheld)

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.path)

    def _client(self, record: Mapping[str, Any]) -> str:
        told = record.get("result", record)
        client = told.get("client") if isinstance(told, Mapping) else None
        if not isinstance(client, str):
            raise _no_result(self.path, f"found {client!r} as the client's name")
        return client


def _plain(result: ClientResult) -> dict[str, Any]:
    """Return what `asdict` does, in a tenth of its time."""
    evaluations = ("personal", "reference", "validation")
    return vars(result) | {name: vars(getattr(result, name)) for name in evaluations}


_PACKAGES = ("flwr", "ray", "torch", "torchvision", "faiss-cpu", "numpy")


def environment() -> dict[str, Any]:
    """Return versions and machine as plain values."""
    return {
        "versions": {
            "python": platform.python_version(),
            "knnper": knnper.__version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write plain values; NaN and infinities become null."""
    write_atomically(path, f"{json.dumps(finite(document), indent=2)}\n")


def read_document(path: Path) -> dict[str, Any]:
    """Return what a file in a run's folder holds."""
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(
            f"{path} is missing: the run is not done; go on with it with "
            f"--resume {path.parent}"
        ) from error
    except ValueError as error:
        raise RunError(f"{path} is damaged, expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise RunError(f"{path} is damaged, expected a JSON object")
    return document


def finite(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values in which null stands for what JSON has no number for."""
    plain: dict[str, Any] = json.loads(to_json(value, inf_nan_mode="null"))
    return plain


EXPERIMENT = "experiment.yaml"
LOCK = ".lock"

# Deleting a folder hangs on this line: it must not occur in files people write.
FIRST_LINE = "# All settings of the run in this folder; written by `knnper simulate`.\n"


def is_run(path: Path) -> bool:
    """Return whether the folder holds a run that this project began."""
    try:
        with open_plain(path / EXPERIMENT) as file:
            return file.readline() == FIRST_LINE.encode()
    except OSError:
        return False


def make_empty(path: Path) -> None:
    """Delete the run in ``path``, if there is one, but for the lock that is held."""
    entries = [entry for entry in path.iterdir() if entry.name != LOCK]
    # What tells that it is a run goes last: a deletion that is cut short can be redone.
    for entry in sorted(entries, key=lambda entry: entry.name == EXPERIMENT):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


RESULTS = "results.json"
_ROSTER = "clients.json"
_SESSION = "session"
_CLIENTS = "clients.csv"
_ROUNDS = "rounds.jsonl"
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder; made by `create` or `open`."""

    path: Path

    @classmethod
    def create(
        cls, path: Path, experiment: Experiment, *, overwrite: bool = False
    ) -> "RunFolder":
        """Return a new folder that holds nothing but ``experiment``."""
        cls.require_free(path, overwrite=overwrite)
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        with folder.locked():
            make_empty(path)
            write_atomically(path / EXPERIMENT, FIRST_LINE + to_yaml(experiment))
        return folder

    @classmethod
    def require_free(cls, path: Path, *, overwrite: bool) -> None:
        """Do nothing if `create` can make a run in ``path``."""
        if path.exists() and not path.is_dir():
            raise FolderTakenError(f"{path} is a file; expected a folder for the run")
        # All that is there where making a run ended with its first file.
        own = {path / LOCK, draft_of(path / EXPERIMENT)}
        if not path.exists() or own.issuperset(path.iterdir()):
            return
        if not is_run(path):
            raise FolderTakenError(
                f"{path} is not empty and holds no run; choose another folder with "
                "--output"
            )
        if not overwrite:
            raise FolderTakenError(
                f"{path} holds a run already; go on with it with --resume {path}, "
                "delete it with --overwrite, or choose another folder with --output"
            )
        cls(path).require_idle()

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Return the folder of a run that was started before."""
        if not (path / EXPERIMENT).is_file():
            raise RunError(
                f"{path} holds no run: {EXPERIMENT} is missing. Give the folder that "
                "was named by --output, or start the run anew"
            )
        require_plain(path)
        return cls(path)

    def experiment(
        self, catalogue: Catalogue, overrides: Sequence[str] = ()
    ) -> Experiment:
        """Return the experiment of this run."""
        source = self.path / EXPERIMENT
        started = read_experiment(source, catalogue)
        resumed = read_experiment(source, catalogue, overrides)
        # The order of weights in checkpoints rests on it.
        formats = {
            getattr(one.model.settings, "memory_format", None)
            for one in (started, resumed)
        }
        is_same = results_identity(started) == results_identity(resumed)
        if not is_same or len(formats) > 1:
            message = (
                f"found {', '.join(overrides)}, which makes it another experiment; "
                "expected settings of the section run that change no result, such as "
                "run.num_workers. Start the changed experiment in a folder of its own"
            )
            raise ConfigError([Problem("override", message)], str(source))
        if changed := self._changed_code(started):
            log.warning("%s", changed)
        return resumed

    def _changed_code(self, experiment: Experiment) -> str:
        """Return which code of a user's is not what it was; empty if it is."""
        if not experiment.own() or not (self.path / _MANIFEST).exists():
            return ""
        before: Mapping[str, str] = self.manifest().get(OWN_CODE, {})
        changed = [
            one.name
            for one in experiment.own().values()
            if before.get(one.name, one.fingerprint) != one.fingerprint
        ]
        if not changed:
            return ""
        return f"{', '.join(changed)} changed since the run in {self.path} began"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from leading this run inside the block."""
        try:
            lock = FileLock(self.path / LOCK)
        except LockHeldError as error:
            raise RunError(
                f"another process is at work on the run in {self.path}; wait for it, "
                "or end it first (`flwr stop` ends a server that stays for clients "
                "that come late)"
            ) from error
        with lock:
            yield

    def require_idle(self) -> None:
        """Refuse a run that a process leads."""
        with self.locked():
            pass

    def is_led(self) -> bool:
        """Return whether a process leads the run; it notices nothing."""
        return lock_holder(self.path / LOCK) is not None

    @property
    def checkpoints(self) -> Path:
        """Where the server keeps its state."""
        return self.path / _CHECKPOINTS

    @property
    def tensorboard(self) -> Path:
        """Where the curves for TensorBoard are."""
        return self.path / "tensorboard"

    @property
    def distributed(self) -> DistributionLog:
        """Which clients have the model, and what they reported."""
        return DistributionLog(self.path / "personalization.jsonl")

    def write_manifest(
        self, experiment: Experiment, split: str, command: Sequence[str]
    ) -> None:
        """Keep under what conditions the run began, and when it was resumed."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        when: dict[str, Any] = {"command": list(command), "started": started}
        if (self.path / _MANIFEST).exists():
            self.require_same_conditions(experiment, split)
            manifest = self.manifest()
            manifest["resumed"].append(when)
        else:
            identity = results_identity(experiment)
            about: dict[str, Any] = {
                "results_identity": identity,
                "partition_hash": split,
            }
            if own := experiment.own().values():
                about[OWN_CODE] = {one.name: one.fingerprint for one in own}
            if traces := digests(experiment.training.devices):
                about[_TRACES] = traces
            manifest = {**about, **when, **environment(), "resumed": []}
        write_document(self.path / _MANIFEST, manifest)

    def require_same_conditions(self, experiment: Experiment, split: str) -> None:
        """Refuse data, traces and users' code that changed since the run began."""
        manifest = self.manifest()
        expected = manifest["partition_hash"]
        if expected != split:
            raise RunError(
                f"the data is not what it was when the run in {self.path} began: "
                f"expected the split {expected[:12]}, found {split[:12]}. Bring it "
                "back, or start again"
            )
        found = digests(experiment.training.devices)
        if manifest.get(_TRACES, {}) != found:
            raise RunError(
                f"{' or '.join(found)} is not what it was when the run in "
                f"{self.path} began; bring it back, or start again"
            )
        if changed := self._changed_code(experiment):
            raise RunError(
                f"{changed}, and its results would be of both; bring the code "
                "back, or start again"
            )

    def manifest(self) -> dict[str, Any]:
        """Return the content of ``manifest.json``."""
        return read_document(self.path / _MANIFEST)

    def session(self) -> str:
        """Return an id that this run has from its beginning, and no other."""
        path = self.path / _SESSION
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex)
        return path.read_text(encoding="utf-8")

    def write_roster(self, roster: Roster) -> None:
        """Keep who takes part, where that is known only when the run begins."""
        write_document(self.path / _ROSTER, asdict(roster))

    def roster(self) -> Roster | None:
        """Return who takes part; None if it was not written."""
        if not (self.path / _ROSTER).exists():
            return None
        found = read_document(self.path / _ROSTER)
        try:
            read = TypeAdapter(Roster).validate_python(found)
            return Roster.of(read.members, read.split)
        except ValidationError as error:
            damaged = f"{self.path / _ROSTER} is damaged: {error}"
            raise RunError(
                f"{damaged}; start the run again in another folder"
            ) from error

    def go_back(self, server_round: int) -> None:
        """Make a round the last one; what came later is put aside."""
        kept = rounds_in(self.checkpoints)
        if server_round not in kept:
            known = ", ".join(map(str, kept)) or "none"
            raise RunError(
                f"expected a round of which {self.path} has a checkpoint ({known}), "
                f"found {server_round}"
            )
        with self.locked():
            files = [self.path / name for name in (RESULTS, _CLIENTS, _ROUNDS)]
            files.append(self.checkpoints / _GAINS)
            there = filter(Path.exists, files)
            put_aside(self.checkpoints, server_round, there)
            # With them the run would be done.
            (self.path / RESULTS).unlink(missing_ok=True)
            self.drop_rounds_after(server_round)

    def forget_aside(self) -> None:
        """Remove what was put aside, as far as the run has passed it."""
        passed = len(self.rounds())
        for aside in asides(self.checkpoints):
            if len(JsonLines(aside / _ROUNDS).read()) <= passed:
                shutil.rmtree(aside, ignore_errors=True)

    def write_clients_csv(
        self,
        results: Iterable[ClientResult],
        metrics: Sequence[str] = (),
        more: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> None:
        """Write ``clients.csv``, see `knnper.server.results.write_clients_csv`."""
        write_clients_csv(self.path / _CLIENTS, results, metrics, more)

    def write_results(self, document: Mapping[str, Any]) -> None:
        """Write ``results.json``, the last file: where it is, the run is done."""
        write_document(self.path / RESULTS, document)

    def is_finished(self) -> bool:
        """Return whether the run has its results."""
        return (self.path / RESULTS).is_file()

    def results(self) -> dict[str, Any]:
        """Return the content of ``results.json``."""
        path = self.path / RESULTS
        document = read_document(path)
        if problem := results_problem(document):
            raise RunError(
                f"{path} is damaged: {problem}. Bring back a copy of the file, or "
                f"remove it and finish the run again with --resume {self.path}"
            )
        return with_present_names(document)

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add the figures of one round to ``rounds.jsonl``; NaN becomes null."""
        self._round_lines.append(finite(record))

    def rounds(self) -> list[dict[str, Any]]:
        """Return the figures of the rounds that were made, oldest first."""
        records = self._round_lines.read()
        for number, record in enumerate(records, start=1):
            if problem := round_problem(record):
                raise RunError(
                    f"line {number} of {self.path / _ROUNDS} is damaged: {problem}. "
                    "Bring back a copy of the file, or start the run again in another "
                    "folder"
                )
        return records

    def drop_rounds_after(self, server_round: int) -> None:
        """Forget the rounds after ``server_round``: they are about to be made again."""
        records = self.rounds()
        kept = [one for one in records if one["server_round"] <= server_round]
        self._round_lines.replace(kept)

    @property
    def _round_lines(self) -> JsonLines:
        return JsonLines(self.path / _ROUNDS)
