"""Checkpoints of the server: a safetensors file and a manifest with a fingerprint."""

import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from knnper.config.errors import CheckpointError, CodecError
from knnper.durable_files import sync_folder, write_atomically
from knnper.transport.codec import (
    Parts,
    canonical,
    fingerprint,
    put_together,
    take_apart,
)

log = logging.getLogger(__name__)

FORMAT = 1
_KEPT = 2
_NAME = re.compile(r"round-(\d+)")
_TENSORS = "state.safetensors"
_MANIFEST = "manifest.json"
_DAMAGE = (OSError, ValueError, KeyError, CodecError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round.

    Attributes
    ----------
    server_round
        The rounds that were made.
    state
        The method's server state.
    fingerprint
        SHA-256 of the state.
    """

    server_round: int
    state: Any
    fingerprint: str


def rounds_in(folder: Path) -> list[int]:
    """Return the rounds of which ``folder`` has a checkpoint, oldest first."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("*"))
    return sorted(int(match[1]) for match in matches if match)


class CheckpointFolder:
    """The newest checkpoints of a run.

    Parameters
    ----------
    folder
        Where they are; created when the first one is saved.
    experiment
        Fingerprint of the experiment: a checkpoint of another one is refused.
    """

    def __init__(self, folder: Path, experiment: str) -> None:
        self._folder = folder
        self._experiment = experiment

    def save(self, server_round: int, state: object) -> Checkpoint:
        """Write a checkpoint; it is complete on disk, or not there, at any time."""
        parts = take_apart(state)
        saved = Checkpoint(server_round, state, fingerprint(state))
        manifest = {
            "format": FORMAT,
            "server_round": server_round,
            "experiment": self._experiment,
            "fingerprint": saved.fingerprint,
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
        sync_folder(self._folder)
        self._remove_old()
        return saved

    def load_latest(self, state_type: type) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; None if there is none.

        Raises
        ------
        CheckpointError
            If there are checkpoints and none can be used.
        """
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

    def oldest_round(self) -> int:
        """Return the earliest round to which a resumed run may go back."""
        return min(self.rounds(), default=0)

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
        return Checkpoint(server_round, state, found)

    def _remove_old(self) -> None:
        for server_round in self.rounds()[:-_KEPT]:
            shutil.rmtree(self._path(server_round), ignore_errors=True)

    def _path(self, server_round: int) -> Path:
        return self._folder / f"round-{server_round:06d}"
