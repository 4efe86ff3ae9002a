"""All that is looked at of one client."""

from collections.abc import Iterator

from client.doctor.connection import Connection
from client.doctor.credentials import Credentials
from client.doctor.models import Kept
from client.doctor.site import Site
from client.doctor.state import State
from client.doctor.trust import Trust
from client.residence.places import Places
from client.settings import ClientSettings
from knnper.transport.diagnosis.finding import Check
from knnper.transport.diagnosis.machine import folder_finding


def client_checks(settings: ClientSettings) -> list[Check]:
    """Return the checks of a client, in the order in which they make sense.

    None of them changes anything on this machine or on the server, and none disturbs
    the client's node.
    """
    return [*_of_the_way(settings), *_of_this_machine(settings)]


def _of_the_way(settings: ClientSettings) -> Iterator[Check]:
    connection = Connection(settings.server, with_tls=not settings.insecure)
    yield Check("address", connection.name_resolves)
    yield Check("proxy", connection.no_proxy_is_between, ("address",))
    yield Check("port", connection.port_is_open, ("address",))
    yield Check("tls", connection.tls_is_agreed, ("port",))
    yield Check("gateway", connection.gateway_answers, ("tls",))
    yield Check("clock", connection.clocks_agree, ("gateway",))
    yield Check("version", connection.versions_agree, ("gateway",))
    if settings.tls is not None:
        trust = Trust(connection, settings.tls.ca)
        yield Check("authority", trust.authority_is_readable)
        yield Check(
            "certificate", trust.certificate_is_accepted, ("gateway", "authority")
        )
    if settings.tls is not None and settings.key is not None:
        credentials = Credentials(
            settings.name,
            settings.key,
            settings.server,
            settings.tls.ca,
            settings.state,
        )
        yield Check("key", credentials.key_is_readable)
        yield Check(
            "registration",
            credentials.key_is_registered,
            # Nothing is signed for a server that is not known.
            ("key", "certificate", "clock"),
        )


def _of_this_machine(settings: ClientSettings) -> Iterator[Check]:
    places = Places(settings.state)
    state = State(places, settings.name, settings.key)
    kept, site = Kept(places), Site(settings)
    yield Check("folder", lambda: folder_finding(settings.state, "state"))
    yield Check("owner", state.is_own, ("folder", "key"))
    yield Check("privacy", state.is_private, ("folder",))
    yield Check("node", state.node, ("folder",))
    yield Check("refusals", state.last_refusal, ("folder",))
    yield Check("limits", site.limits)
    yield Check("data", site.data)
    yield Check("model", kept.models, ("folder",))
    yield Check("memory", kept.store, ("model",))
    yield Check("service", site.service)
