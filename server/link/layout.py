"""The folder that ``knnper federation init`` makes, and what is where in it."""

from dataclasses import dataclass
from pathlib import Path

from knnper.config.errors import RunError
from server.link.authorized import require_name

LOCK = "lock"
"""The file in a server's state folder that is locked while the server runs."""


@dataclass(frozen=True)
class FederationFolder:
    """A folder with the server's files, the authority's and each client's.

    Attributes
    ----------
    path
        The folder.
    """

    path: Path

    @property
    def server(self) -> Path:
        """Goes to the server's machine."""
        return self.path / "server"

    @property
    def server_file(self) -> Path:
        """The server's settings."""
        return self.server / "server.yaml"

    @property
    def authorized(self) -> Path:
        """Public keys of the clients that may connect."""
        return self.server / "authorized"

    @property
    def authority(self) -> Path:
        """Stays where it is safest: who has its key can pretend to be the server."""
        return self.path / "ca"

    def client(self, name: str) -> Path:
        """Return what goes to the machine of the client ``name``.

        Raises
        ------
        CredentialError
            If the name is not allowed.
        """
        require_name(name)
        return self.path / "clients" / name


def server_file(place: Path) -> Path:
    """Return the server's YAML file at ``place``.

    Parameters
    ----------
    place
        The file itself, or the folder that ``knnper federation init`` made.

    Raises
    ------
    RunError
        If there is none.
    """
    if not place.is_dir():
        return place
    for file in (FederationFolder(place).server_file, place / "server.yaml"):
        if file.is_file():
            return file
    raise RunError(
        f"{place} holds no server.yaml; give the file, or the folder that `knnper "
        "federation init` made"
    )
