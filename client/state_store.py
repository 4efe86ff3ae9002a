"""What clients remember between rounds: one safe file per client and round."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from safetensors import safe_open
from safetensors.torch import save

from knnper.config.errors import CheckpointError
from knnper.durable_files import write_atomically
from knnper.transport.codec import Parts, canonical, put_together, take_apart

R = TypeVar("R")

_NAME = re.compile(r"round-(\d+)\.safetensors")


class ClientStateStore:
    """Client states in a folder, by client and round.

    A state is kept until the server has a checkpoint that no longer needs it: after a
    kill, a client goes on from the state it had at the checkpoint, not from one that
    the repeated rounds are about to make again.

    Parameters
    ----------
    folder
        Where the states are; created when the first one is saved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, record_type: type[R], client: str, before_round: int) -> R | None:
        """Return the client's newest state from before a round; None if it has none.

        Raises
        ------
        CheckpointError
            If the file is damaged.
        """
        earlier = [r for r in self._rounds(client) if r < before_round]
        if not earlier:
            return None
        path = self._path(client, max(earlier))
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                tensors = {name: file.get_tensor(name) for name in names}
                structure = file.metadata()["structure"]
        except Exception as error:
            raise CheckpointError(
                f"the state of client {client!r} in {path} cannot be read ({error}); "
                "remove the run's folder and start again"
            ) from error
        return canonical(put_together(record_type, Parts(tensors, structure)))

    def save(self, client: str, server_round: int, state: object, keep: int) -> None:
        """Write the client's state after a round, atomically.

        Parameters
        ----------
        client
            The client's name.
        server_round
            The round that ended with this state.
        state
            A record.
        keep
            States older than the newest of this round or before are removed.
        """
        parts = take_apart(state)
        path = self._path(client, server_round)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in parts.tensors.items()}
        write_atomically(path, save(tensors, {"structure": parts.structure}))
        self._prune(client, keep)

    def _prune(self, client: str, keep: int) -> None:
        not_needed = sorted(r for r in self._rounds(client) if r <= keep)[:-1]
        for server_round in not_needed:
            self._path(client, server_round).unlink(missing_ok=True)

    def _rounds(self, client: str) -> Iterator[int]:
        folder = self._folder / client
        names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
        matches = (_NAME.fullmatch(name) for name in names)
        return (int(match[1]) for match in matches if match)

    def _path(self, client: str, server_round: int) -> Path:
        return self._folder / client / f"round-{server_round:06d}.safetensors"
