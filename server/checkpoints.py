"""Checkpoints of a run: the server's state after a round, and the run's history.

A checkpoint is a folder ``round-NNNNNN`` with a manifest, the manifest's checksum and
the tensors of the state. It is written under another name and then renamed, so that it
is complete or absent at any time.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from knnper.errors import CheckpointError, CodecError
from knnper.files import JsonLines, parse_json, sync_to_disc, write_atomically
from knnper.records import Parts, canonical, fingerprint, put_together, take_apart
from knnper.server.explosion import is_near_lowest
from knnper.server.screening import Norms

log = logging.getLogger(__name__)

FORMAT = 2  # of checkpoints
KEPT = 6  # checkpoints that are kept by default
GAINS = "gains.jsonl"

_RELEASES = "releases.jsonl"
_NAME = re.compile(r"round-(\d+)")
_TENSORS = "state.safetensors"
_MANIFEST = "manifest.json"
_CHECKSUM = "manifest.sha256"  # of the manifest, in hexadecimal
_DAMAGE = (OSError, ValueError, KeyError, TypeError, CodecError, SafetensorError)


@dataclass(frozen=True)
class History:
    """Memory of earlier rounds that the next rounds need.

    Attributes
    ----------
    norms
        By field of an update: how far clients moved it in the last rounds.
    lowest_loss
        The lowest median train loss of any round.
    trained_in
        By client, the last round in which its update was used. None for methods
        without client state.
    gains
        For each round from the first, the statistical utility of its clients; empty
        unless clients are selected by utility.
    agreements
        `knnper.server.screening.agreements` of the last rounds over real clients.
    left_out
        Clients left out after an explosion: ``after_round``, the last round with them,
        and ``cosine``, their mean cosine with the others.
    good_round
        The last round that began with about as good a model as any, or None.
    clip_norm
        The adaptive clip norm of the next private round; None if there is none.
    """

    norms: Mapping[str, Norms] = field(default_factory=dict)
    lowest_loss: float | None = None
    trained_in: Mapping[str, int] | None = None
    gains: Sequence[Mapping[str, float]] = field(default_factory=list)
    agreements: Sequence[Mapping[str, float]] = field(default_factory=list)
    left_out: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    good_round: int | None = None
    clip_norm: float | None = None

    def after(
        self,
        server_round: int,
        norms: Mapping[str, Norms],
        loss: float | None,
        used: Collection[str],
    ) -> "History":
        """Return the history after one more round.

        Parameters
        ----------
        norms
            Those of all rounds up to this one.
        loss
            Median train loss of the round, or None if it does not count.
        used
            Clients with a used update.
        """
        lowest_loss, good_round = self.lowest_loss, self.good_round
        if loss is not None:
            lowest_loss = loss if lowest_loss is None else min(loss, lowest_loss)
            if is_near_lowest(loss, lowest_loss):
                good_round = server_round
        trained_in = self.trained_in
        if trained_in is not None:
            trained_in = {**trained_in, **dict.fromkeys(used, server_round)}
        return replace(
            self,
            norms=norms,
            lowest_loss=lowest_loss,
            good_round=good_round,
            trained_in=trained_in,
        )

    def state_rounds(self, clients: Sequence[str], last_round: int) -> tuple[int, ...]:
        """Return the round after which each client's state is current; 0 is the start.

        ``last_round`` applies to all clients if the method keeps no state at them.
        """
        if self.trained_in is None:
            return (last_round,) * len(clients)
        return tuple(self.trained_in.get(client, 0) for client in clients)

    def as_document(self) -> dict[str, Any]:
        """Return plain values for the manifest: of ``gains`` only the number."""
        document: dict[str, Any] = {
            "norms": {name: vars(norms) for name, norms in self.norms.items()},
            "lowest_loss": self.lowest_loss,
            "good_round": self.good_round,
            "trained_in": self.trained_in,
            "num_gains": len(self.gains),
        }
        if self.agreements:
            document["agreements"] = self.agreements
        if self.left_out:
            document["left_out"] = self.left_out
        if self.clip_norm is not None:
            document["clip_norm"] = self.clip_norm
        return document


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round.

    Attributes
    ----------
    state
        The method's record.
    fingerprint
        Of the state.
    earlier
        Checkpoints of models with which clients still train.
    """

    server_round: int
    state: Any
    fingerprint: str
    history: History = field(default_factory=History)
    earlier: Sequence["Checkpoint"] = ()


def rounds_in(folder: Path) -> list[int]:
    """Return the rounds with a checkpoint in ``folder``, oldest first."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("*"))
    return sorted(int(match[1]) for match in matches if match)


def checkpoint_of(folder: Path, server_round: int) -> Path:
    """Return the path of a round's checkpoint in ``folder``."""
    return folder / f"round-{server_round:06d}"


def delete_after(folder: Path, server_round: int) -> None:
    """Delete the checkpoints of later rounds."""
    # The newest first, so that a run that is killed here can be resumed.
    for later in reversed(rounds_in(folder)):
        if later > server_round:
            shutil.rmtree(checkpoint_of(folder, later))


def to_keep(rounds: Sequence[int], most: int) -> list[int]:
    """Choose at most ``most`` rounds to keep checkpoints of, oldest first.

    These are the newest two, and for 2, 4, 8, ... the newest two multiples, so that
    each is about twice as far back as the next. The newest of the others fill up the
    rest.
    """
    chosen = set(rounds[-1:])
    for power in range(most - 1):
        chosen.update([number for number in rounds if number % 2**power == 0][-2:])
    others = [number for number in reversed(rounds) if number not in chosen]
    return sorted([*chosen, *others[: most - len(chosen)]])


class CheckpointFolder:
    """The newest checkpoints of a run, and older checkpoints at growing distances."""

    def __init__(self, folder: Path, experiment: str, most: int = KEPT) -> None:
        self._folder = folder
        self._experiment = experiment  # fingerprint; other checkpoints are refused
        self._most = most
        # Of the checkpoint written last: each state's file, and its description.
        self._written: dict[int, tuple[Path, dict[str, Any]]] = {}
        # A file of its own with a line a round: inside each checkpoint, the gains would
        # take space that grows with the square of the number of rounds.
        self._gains = JsonLines(folder / GAINS)
        self._num_gains: int | None = None  # lines in the file; None if not known
        self._gains_digest = hashlib.sha256()

    @property
    def releases(self) -> JsonLines:
        """File of the private releases to real clients; going back keeps it whole."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return JsonLines(self._folder / _RELEASES)

    @property
    def waiting(self) -> Path:
        """Folder in which updates of a round may wait on disk."""
        return self._folder / ".waiting"

    def save(
        self,
        server_round: int,
        state: object,
        history: History | None = None,
        earlier: Iterable[Checkpoint] = (),
    ) -> Checkpoint:
        """Write a checkpoint; delete those that are no longer kept.

        The states of ``earlier`` are stored in it, too.
        """
        checkpoint = Checkpoint(
            server_round,
            state,
            fingerprint(state),
            history or History(),
            tuple(earlier),
        )
        self._append_gains(checkpoint.history.gains)
        self._write(checkpoint)
        rounds = self.rounds()
        for old in set(rounds) - set(to_keep(rounds, self._most)):
            shutil.rmtree(self._path(old), ignore_errors=True)
        return checkpoint

    def load_latest(self, state_type: type) -> Checkpoint | None:
        """Load the newest undamaged checkpoint; return None if there is none at all.

        Raises
        ------
        CheckpointError
            All are damaged, or one belongs to another experiment.
        """
        rounds = self.rounds()
        latest = self._load_newest(rounds, state_type)
        if latest is None and rounds:
            raise CheckpointError(
                f"none of the checkpoints in {self._folder} can be read; start the "
                "experiment again in another folder"
            )
        return latest

    def load_before(self, server_round: int, state_type: type) -> Checkpoint | None:
        """Load the newest undamaged checkpoint of an earlier round, or return None."""
        earlier = [number for number in self.rounds() if number < server_round]
        return self._load_newest(earlier, state_type)

    def forget_after(self, server_round: int) -> None:
        """Remove the checkpoints of later rounds, which are about to be repeated."""
        delete_after(self._folder, server_round)
        self._written, self._num_gains = {}, None

    def rounds(self) -> list[int]:
        """Return the rounds with a checkpoint, oldest first."""
        return rounds_in(self._folder)

    def rounds_for_clients(self) -> list[int]:
        """Return the rounds after which clients must keep their states, oldest first.

        These are the rounds with a checkpoint: the run can go back to them.
        """
        return self.rounds() or [0]

    def _append_gains(self, gains: Sequence[Mapping[str, float]]) -> None:
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

    def _write(self, checkpoint: Checkpoint) -> None:
        server_round, target = (
            checkpoint.server_round,
            self._path(checkpoint.server_round),
        )
        draft = self._folder / f".round-{server_round}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        description = _write_state(draft / _TENSORS, checkpoint)
        written = {server_round: (target / _TENSORS, description)}
        for earlier in checkpoint.earlier:
            number = earlier.server_round
            name = _earlier_file(number)
            file, its_description = self._written.get(number, (None, {}))
            # Clients may train with a model for many rounds; it is written once.
            if file is None or not _link(file, draft / name):
                its_description = _write_state(draft / name, earlier)
            written[number] = target / name, its_description
        manifest = {
            "format": FORMAT,
            "server_round": server_round,
            "experiment": self._experiment,
            "history": checkpoint.history.as_document(),
            "earlier": {
                earlier.server_round: written[earlier.server_round][1]
                for earlier in checkpoint.earlier
            },
            **description,
        }
        if checkpoint.history.gains:
            manifest["gains_sha256"] = self._gains_digest.hexdigest()
        content = to_json(manifest, indent=2)
        write_atomically(draft / _MANIFEST, content)
        write_atomically(draft / _CHECKSUM, hashlib.sha256(content).hexdigest())
        shutil.rmtree(target, ignore_errors=True)
        draft.replace(target)
        sync_to_disc(self._folder)
        self._written = written

    def _load_newest(
        self, rounds: Sequence[int], state_type: type
    ) -> Checkpoint | None:
        for server_round in reversed(rounds):
            try:
                return self._load(server_round, state_type)
            except _DAMAGE as error:
                path = self._path(server_round)
                log.warning("the checkpoint %s is damaged: %s", path, error)
        return None

    def _load(self, server_round: int, state_type: type) -> Checkpoint:
        path = self._path(server_round)
        manifest = _read_manifest(path)
        if manifest["format"] != FORMAT or manifest["experiment"] != self._experiment:
            raise CheckpointError(
                f"{path} belongs to another experiment or version; resume with the "
                "settings that started the run, or start in another folder"
            )
        history = dict(manifest["history"])
        norms = {name: Norms(**value) for name, value in history.pop("norms").items()}
        num_gains = history.pop("num_gains")
        gains = self._gains.read()[:num_gains]
        if len(gains) < num_gains:
            raise ValueError(f"{GAINS} has {len(gains)} rounds, expected {num_gains}")
        if gains and _digest_of(gains).hexdigest() != manifest["gains_sha256"]:
            raise ValueError(f"{GAINS} has changed since it was written")
        earlier = [
            Checkpoint(
                int(number),
                _read_state(path / _earlier_file(int(number)), description, state_type),
                "",
            )
            for number, description in manifest["earlier"].items()
        ]
        return Checkpoint(
            server_round,
            _read_state(path / _TENSORS, manifest, state_type),
            manifest["fingerprint"],
            History(norms, gains=gains, **history),
            tuple(earlier),
        )

    def _path(self, server_round: int) -> Path:
        return checkpoint_of(self._folder, server_round)


class CheckpointWriter(contextlib.AbstractContextManager["CheckpointWriter"]):
    """Writes checkpoints in a thread while the next round is made.

    The disk takes longer than anything else between two rounds. At most one checkpoint
    is being written, and none when the context ends.
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
        """Begin to write a checkpoint; an error of the previous one is raised now."""
        self.latest()
        self._begun = self._thread.submit(
            self._folder.save, server_round, state, history, earlier
        )

    def latest(self) -> Checkpoint | None:
        """Wait for the latest checkpoint to be on disk, and return it, if any."""
        return None if self._begun is None else self._begun.result()


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest; raise `ValueError` if its checksum is wrong."""
    content = (checkpoint / _MANIFEST).read_bytes()
    expected = (checkpoint / _CHECKSUM).read_text()
    if hashlib.sha256(content).hexdigest() != expected:
        raise ValueError(f"{_MANIFEST} has changed since it was written")
    manifest: dict[str, Any] = parse_json(content)
    return manifest


def _digest_of(
    gains: Iterable[Mapping[str, float]], digest: "hashlib._Hash | None" = None
) -> "hashlib._Hash":
    """Return the SHA-256 of lines of gains; ``digest`` is that of the lines before."""
    digest = hashlib.sha256() if digest is None else digest
    for gains_of_round in gains:
        digest.update(json.dumps(gains_of_round).encode())
    return digest


def _earlier_file(server_round: int) -> str:
    return f"earlier-{server_round:06d}.safetensors"


def _link(file: Path, link: Path) -> bool:
    """Make ``link`` a hard link to ``file``; return False where links do not work."""
    try:
        os.link(file, link)
    except OSError:
        return False
    return True


def _write_state(file: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Write the tensors of a state; return its description for the manifest."""
    parts = take_apart(checkpoint.state)
    tensors = {name: tensor.contiguous() for name, tensor in parts.tensors.items()}
    write_atomically(file, save(tensors))
    return {
        "fingerprint": checkpoint.fingerprint or fingerprint(checkpoint.state),
        "structure": json.loads(parts.structure),
    }


def _read_state(file: Path, description: Mapping[str, Any], state_type: type) -> Any:
    structure = json.dumps(description["structure"], separators=(",", ":"))
    parts = Parts(load_file(file), structure)
    state: object = canonical(put_together(state_type, parts))
    actual, expected = fingerprint(state), description["fingerprint"]
    if actual != expected:
        raise ValueError(f"expected fingerprint {expected}, found {actual}")
    return state
