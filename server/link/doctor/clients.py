"""Who may connect, and whether Flower knows."""

from dataclasses import dataclass

from knnper.config.errors import RunError
from knnper.transport.diagnosis.finding import Finding, fine, problem, warning
from server.link.authorized import AuthorizedFolder
from server.link.census import AUTHORIZED, census
from server.link.roster_file import read_roster
from server.settings import ServerSettings

_LOG = "the server's log says why; a key that was removed cannot come back"


@dataclass(frozen=True)
class Clients:
    """The clients of a server.

    Attributes
    ----------
    settings
        Of the server.
    """

    settings: ServerSettings

    def authorized(self) -> Finding:
        """Look at the folder of public keys."""
        folder = self.settings.authorized
        keys, problems = AuthorizedFolder(folder).keys()
        if problems:
            return problem(
                "; ".join(problems),
                f"remove or replace these files in {folder}",
                "one public key a file, each in one file only",
            )
        if not keys:
            return warning(
                f"no client may connect: {folder} holds no key",
                "knnper federation add-client, or register",
            )
        return fine(f"{len(keys)} in {folder}: {', '.join(keys)}")

    def registered(self) -> Finding:
        """Look whether Flower knows those who may connect, and who is online."""
        found = census(self.settings)
        if found.problems:
            return problem("; ".join(found.problems), "look into the server's log")
        left_out = [one.name for one in found.clients if one.status == AUTHORIZED]
        if left_out:
            return problem(f"not registered: {', '.join(left_out)}", _LOG)
        online = [one.name for one in found.clients if one.status == "online"]
        return fine(
            f"{len(found.clients)} registered, online: {', '.join(online) or 'none'}"
        )

    def roster(self) -> Finding:
        """Look at the file by which runs know who is behind which node."""
        try:
            roster = read_roster(self.settings.roster_file)
        except RunError as error:
            return problem(
                str(error),
                f"remove {self.settings.roster_file}; the server writes it anew",
            )
        return fine(f"{len(roster)} clients in {self.settings.roster_file}")
