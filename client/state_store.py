"""What clients remember between rounds: one safe file per client and round."""

import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from safetensors import safe_open
from safetensors.torch import save

from knnper.config.errors import CheckpointError
from knnper.durable_files import write_atomically
from knnper.transport.codec import Parts, canonical, put_together, take_apart

R = TypeVar("R")

_ASIDE = "aside"
_NAME = re.compile(r"round-(\d+)\.safetensors")


class ClientStateStore:
    """Client states in a folder, by client and round.

    Those are kept that belong to a checkpoint of the server's: after a kill, or when
    the run goes back to an older round, a client goes on from the state it had there,
    not from one that the repeated rounds are about to make again. Such a state is put
    aside until the run has passed its round: the server may think better of it.

    Parameters
    ----------
    folder
        Where the states are; created when the first one is saved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, record_type: type[R], client: str, after_round: int) -> R | None:
        """Return the client's state after a round; None if it has none.

        It is the newest of that round or before. Newer ones count no longer.

        Raises
        ------
        CheckpointError
            If the file is damaged.
        """
        self._go_to(client, after_round)
        earlier = self._rounds(client)
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

    def save(
        self, client: str, server_round: int, state: object, keep: Collection[int]
    ) -> None:
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
            The rounds to which the server may go back. The newest state at each of them
            stays, and all that are newer than the latest.
        """
        parts = take_apart(state)
        path = self._path(client, server_round)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in parts.tensors.items()}
        write_atomically(path, save(tensors, {"structure": parts.structure}))
        self._prune(client, keep)

    def _go_to(self, client: str, server_round: int) -> None:
        """Put aside what is newer than a round; take up what was put aside of it."""
        for number in self._rounds(client):
            if number > server_round:
                path = self._path(client, number)
                aside = self._aside(path)
                aside.parent.mkdir(exist_ok=True)
                path.replace(aside)
        wanted = self._path(client, server_round)
        if not wanted.exists() and self._aside(wanted).exists():
            self._aside(wanted).replace(wanted)

    def _prune(self, client: str, keep: Collection[int]) -> None:
        latest = max(keep, default=0)
        own = self._rounds(client)
        needed = {max((r for r in own if r <= one), default=0) for one in keep}
        for server_round in own:
            if server_round <= latest and server_round not in needed:
                self._path(client, server_round).unlink(missing_ok=True)
        aside = self._rounds(f"{client}/{_ASIDE}")
        if aside and max(aside) <= latest:
            shutil.rmtree(self._folder / client / _ASIDE, ignore_errors=True)

    def _rounds(self, place: str) -> list[int]:
        folder = self._folder / place
        names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
        matches = (_NAME.fullmatch(name) for name in names)
        return [int(match[1]) for match in matches if match]

    def _path(self, client: str, server_round: int) -> Path:
        return self._folder / client / f"round-{server_round:06d}.safetensors"

    def _aside(self, path: Path) -> Path:
        return path.parent / _ASIDE / path.name
