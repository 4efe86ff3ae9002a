"""All that is looked at of one server."""

from collections.abc import Iterator

from knnper.transport.diagnosis.finding import Check, Finding, fine, warning
from knnper.transport.diagnosis.machine import folder_finding
from knnper.transport.diagnosis.versions import own_versions
from server.link.doctor.clients import Clients
from server.link.doctor.credentials import Credentials
from server.link.doctor.ports import Ports, is_running
from server.settings import ServerSettings


def server_checks(settings: ServerSettings) -> list[Check]:
    """Return the checks of a server, in the order in which they make sense.

    None of them changes anything, whether the server runs or not.
    """
    return list(_checks(settings))


def _checks(settings: ServerSettings) -> Iterator[Check]:
    runs = settings.runs_folder
    yield Check("folder", lambda: folder_finding(settings.state, "state"))
    yield Check("runs", lambda: folder_finding(runs, "runs"))
    yield Check("version", _versions)
    if settings.tls is None:
        yield Check("tls", _insecure)
    else:
        credentials = Credentials(settings.tls)
        yield Check("certificate", credentials.certificate)
        yield Check("key", credentials.key)
    ports, clients = Ports(settings), Clients(settings)
    yield Check("server", ports.server)
    yield Check("gateway port", ports.gateway)
    yield Check("control port", ports.control)
    if is_running(settings.state):
        yield Check("processes", ports.processes)
    if settings.tls is not None:
        yield Check("authorized", clients.authorized)
        yield Check("roster", clients.roster)
        if is_running(settings.state):
            yield Check("registered", clients.registered, ("control port",))


def _versions() -> Finding:
    shown = (f"{package} {version}" for package, version in own_versions().items())
    return fine(f"{', '.join(shown)}; the clients need the same")


def _insecure() -> Finding:
    return warning(
        "nothing is encrypted, and whoever reaches the gateway is a client: `insecure: "
        "true`",
        "make certificates and keys: knnper federation init",
    )
