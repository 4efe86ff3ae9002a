"""Checkpoints of the server: a safetensors file and a manifest with a fingerprint."""

import json
import logging
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from knnper.errors import CheckpointError, CodecError
from knnper.files import sync_to_disc, write_atomically
from knnper.records import Parts, canonical, fingerprint, put_together, take_apart
from knnper.server.screening import Norms

log = logging.getLogger(__name__)
FORMAT = 1
KEPT = 6
"""Checkpoints that are kept where nothing else is said."""

_NAME = re.compile(r"round-(\d+)")
_ASIDE = re.compile(r"aside-(\d+)-after-(\d+)")
_TENSORS = "state.safetensors"
_MANIFEST = "manifest.json"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, CodecError, SafetensorError)


@dataclass(frozen=True)
class History:
    """What the rounds so far tell of the next: the loop's part of a checkpoint."""

    norms: Mapping[str, Norms] = field(default_factory=dict)
    lowest_loss: float | None = None
    trained_in: Mapping[str, int] | None = None

    def after(
        self,
        server_round: int,
        norms: Mapping[str, Norms],
        loss: float | None,
        used: Collection[str],
    ) -> "History":
        """Return what is known after one more round."""
        lowest, trained_in = self.lowest_loss, self.trained_in
        if loss is not None:
            lowest = loss if lowest is None else min(loss, lowest)
        if trained_in is not None:
            trained_in = {**trained_in, **dict.fromkeys(used, server_round)}
        return History(norms, lowest, trained_in)

    def state_rounds(self, clients: Sequence[str], last_round: int) -> tuple[int, ...]:
        """Return after which round each client goes on; 0 is from the start."""
        if self.trained_in is None:
            return (last_round,) * len(clients)
        return tuple(self.trained_in.get(client, 0) for client in clients)


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round."""

    server_round: int
    state: Any
    fingerprint: str
    history: History = field(default_factory=History)


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

    @property
    def waiting(self) -> Path:
        """Where updates of a round may wait on disk."""
        return self._folder / ".waiting"

    def save(
        self, server_round: int, state: object, history: History | None = None
    ) -> Checkpoint:
        """Write a checkpoint; it is complete on disk, or not there, at any time."""
        parts = take_apart(state)
        history = history or History()
        saved = Checkpoint(server_round, state, fingerprint(state), history)
        manifest = {
            "format": FORMAT,
            "server_round": server_round,
            "experiment": self._experiment,
            "fingerprint": saved.fingerprint,
            "history": asdict(history),
            "structure": json.loads(parts.structure),
        }
        draft = self._folder / f".round-{server_round}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        tensors = {name: tensor.contiguous() for name, tensor in parts.tensors.items()}
        write_atomically(draft / _TENSORS, save(tensors))
        write_atomically(draft / _MANIFEST, json.dumps(manifest, indent=2))
        target = self._path(server_round)
        shutil.rmtree(target, ignore_errors=True)
        draft.replace(target)
        sync_to_disc(self._folder)
        self._remove_old()
        return saved

    def load_latest(self, state_type: type) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; None if there is none."""
        rounds = self.rounds()
        for server_round in reversed(rounds):
            try:
                return self._load(server_round, state_type)
            except _DAMAGE as error:
                path = self._path(server_round)
                log.warning("the checkpoint %s is damaged: %s", path, error)
        if rounds:
            raise CheckpointError(
                f"none of the checkpoints in {self._folder} can be read; start the "
                "experiment again in another folder"
            )
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
        manifest = json.loads((path / _MANIFEST).read_text())
        if manifest["format"] != FORMAT or manifest["experiment"] != self._experiment:
            raise CheckpointError(
                f"{path} belongs to another experiment or version; resume with the "
                "settings that started the run, or start in another folder"
            )
        structure = json.dumps(manifest["structure"], separators=(",", ":"))
        tensors = load_file(path / _TENSORS)
        state: object = canonical(put_together(state_type, Parts(tensors, structure)))
        found = fingerprint(state)
        if found != manifest["fingerprint"]:
            expected = manifest["fingerprint"]
            raise ValueError(f"expected fingerprint {expected}, found {found}")
        told = manifest.get("history", {})
        norms = {name: Norms(**one) for name, one in told.pop("norms", {}).items()}
        history = History(norms, **told)
        return Checkpoint(server_round, state, found, history)

    def _remove_old(self) -> None:
        rounds = self.rounds()
        for server_round in set(rounds) - set(to_keep(rounds, self._most)):
            shutil.rmtree(self._path(server_round), ignore_errors=True)

    def _path(self, server_round: int) -> Path:
        return checkpoint_of(self._folder, server_round)
