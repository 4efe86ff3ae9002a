"""The checks of ``knnper site doctor``: they change nothing and disturb nothing."""

import contextlib
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path

import httpx
from flwr.proto.fleet_pb2 import ActivateNodeRequest

from knnper.client.activation import Activation, node_process
from knnper.client.limits import REFUSALS, last_refusal
from knnper.client.server_checks import server_checks
from knnper.client.settings import ClientSettings
from knnper.client.state import (
    Serving,
    StateFolder,
    pending_serving,
    read_serving,
    require_own,
)
from knnper.data.site import survey_site
from knnper.data.site_check import check_site
from knnper.datastore.examples import StoreError
from knnper.datastore.store import DATABASE, open_store
from knnper.errors import CredentialError, DataError
from knnper.files import is_private
from knnper.strategies.core.exported_model import (
    ModelError,
    read_model,
    require_fingerprint,
)
from knnper.transport import flower_protocol as flower
from knnper.transport.credentials import (
    fingerprint,
    permission_problem,
    read_node_key,
    replaced_keys,
)
from knnper.transport.diagnosis import (
    IMPOSSIBLE_PAUSE_S,
    Check,
    Finding,
    Standing,
    Verdict,
    connected,
    encrypted,
    fine,
    folder_finding,
    from_message,
    get,
    problem,
    skipped,
    standing_in,
    warning,
)

_START_NODE = "start it: knnper fed client; the server accepts it within a minute"
_GET_MODEL_AGAIN = (
    "have the run distribute it again (start knnper fed client), or bring it: knnper "
    "site onboard --model FOLDER"
)
# Flower takes a node for offline after two missed heartbeats, 30 s apart.
_OFFLINE_AFTER_S = 60.0


def client_checks(settings: ClientSettings) -> Iterator[Check]:
    """Yield the checks of a client, in the order in which to fix problems."""
    ca = settings.tls.ca if settings.tls else None
    yield from server_checks(settings.server, ca)
    if ca is not None and settings.key is not None:
        yield Check("key", partial(check_key, settings, settings.key))
        # A server that is not authenticated gets no signature.
        yield Check(
            "registration",
            partial(check_registration, settings, settings.key, ca),
            ("key", "certificate", "clock"),
        )
    yield Check("folder", partial(check_folder, settings))
    yield Check("refusals", partial(check_refusals, settings), ("folder",))
    yield Check("data", partial(check_data, settings))
    yield Check("model", partial(check_model, settings), ("folder",))
    yield Check("service", partial(check_service, settings))


def check_key(settings: ClientSettings, path: Path) -> Finding:
    """Check that the client's key can be read, by its owner only."""
    try:
        key = read_node_key(path)
    except CredentialError as error:
        return problem(
            str(error),
            "bring back the key that the operator sent, or correct `key`; a new key "
            f"has to be registered: knnper fed register FEDERATION {settings.name} "
            f"{path.name}.pub",
        )
    exposed = permission_problem(path)
    if exposed is not None:
        return from_message(Verdict.WARNING, exposed, "mode 0600")
    return fine(f"{fingerprint(key.public_key())} ({path})")


def check_registration(settings: ClientSettings, path: Path, ca: Path) -> Finding:
    """Ask for an activation that Flower rejects before it changes anything.

    Flower verifies the signature and looks the key up first, so its error code shows
    whether it knows the key.
    """
    key = read_node_key(path)
    request = ActivateNodeRequest(
        public_key=flower.public_pem(key.public_key()),
        heartbeat_interval=IMPOSSIBLE_PAUSE_S,
    )
    try:
        with flower.http_client(settings.server, ca) as client:
            headers = flower.signed_headers(key)
            response = flower.post(client, flower.ACTIVATE, request, headers)
    except httpx.HTTPError:
        return problem(
            "the server did not answer", "try again, and read the server's log"
        )
    error = flower.FlowerError.of(response.text)
    reason = error.extra or error.detail
    if error.code == flower.NOT_ACCEPTED:
        public = f"{path.name}.pub"
        return problem(
            f"the key {fingerprint(key.public_key())} is not registered with the "
            "server, or no longer",
            f"send {public} to the federation's operator, who runs: knnper fed "
            f"register FEDERATION {settings.name} {public}. A key that was removed "
            "cannot come back: make a new one",
        )
    if response.status_code == HTTPStatus.UNAUTHORIZED:
        return problem(
            f"the server does not accept the key's signature: {reason}",
            "set both clocks; if they agree, have the key registered again",
        )
    if error.code != flower.BAD_HEARTBEAT:
        return problem(
            "the server's answer cannot be understood (HTTP status "
            f"{response.status_code}): {reason}",
            "install the same versions on both sides",
        )
    return _judge_standing(settings, standing_in(response.text))


def _judge_standing(settings: ClientSettings, standing: Standing | None) -> Finding:
    """Judge what the gateway knows of the key: its name and last activity."""
    state, name = settings.state, settings.name
    process = node_process(state)
    if standing is None or standing.name is None:
        return fine("the server knows the key; it sends no name")
    if standing.name != name:
        return problem(
            f"the key is registered as {standing.name}, and `name` is {name}",
            f"set `name: {standing.name}`, or use the key of {name}: a name is one key",
        )
    if process is not None:
        return fine(f"registered as {name}, and its node runs ({process})")
    if standing.idle_s is None or standing.idle_s >= _OFFLINE_AFTER_S:
        return fine(f"registered as {name}")
    heard = f"{standing.idle_s:.0f} s ago the server heard of a node with this key"
    left_behind = None
    with contextlib.suppress(OSError):  # the folder was never locked
        left_behind = Activation.of(state).left_behind()
    if left_behind is not None:
        return warning(
            f"{heard}, maybe the one of {state}, which did not leave in order",
            _START_NODE,
        )
    return problem(
        f"{heard}, which does not run from {state}",
        "stop the other node: a second one is rejected while the first is online. For "
        "another client, make another key: knnper fed add-client",
        "no other node with this client's name and key",
    )


def check_folder(settings: ClientSettings) -> Finding:
    """Check that the state folder is writable, this client's, and private."""
    path = settings.state
    finding = folder_finding(path, "state")
    if finding.verdict is Verdict.PROBLEM or not path.exists():
        return finding
    key = None
    replaced = frozenset[str]()
    if settings.key is not None:
        # The check of the key reports a file that cannot be read.
        with contextlib.suppress(CredentialError):
            key = fingerprint(read_node_key(settings.key).public_key())
            replaced = replaced_keys(settings.key)
    require_own(StateFolder(path), settings.name, key, replaced)
    if not is_private(path):
        return warning(
            f"other users can look into {path}, which holds examples",
            f"chmod 700 {path}",
            "mode 0700",
        )
    return finding


def check_refusals(settings: ClientSettings) -> Finding:
    """Show the last refusal since a model was installed."""
    refusal = last_refusal(settings.state)
    if refusal is None:
        return fine("none was recorded")
    at = f"at {refusal.time:%Y-%m-%d %H:%M} UTC"
    serving = read_serving(StateFolder(settings.state).serving)
    if serving is not None and serving.installed > refusal.time.timestamp():
        return fine(f"the last one, {at}, is older than the model")
    if refusal.about == "model":
        return problem(
            f"{at}, {refusal.reason}",
            "install the same versions on both sides, and distribute it again",
            "the fingerprint that the server announced",
        )
    if refusal.about == "run":
        return warning(
            f"{at}, this site refused a run: {refusal.reason}",
            "to take part, change client.yaml; or ask for another experiment",
        )
    return warning(
        f"{at}, the server refused this client: {refusal.reason}",
        f"once that is fixed, remove {settings.state / REFUSALS}",
    )


def check_data(settings: ClientSettings) -> Finding:
    """Check that the data can be read, for the task of the served model if any."""
    fix = f"see all details: knnper site check {settings.file}"
    folder = StateFolder(settings.state)
    task = None
    with contextlib.suppress(ModelError):
        serving = read_serving(folder.serving)
        if serving is not None:
            task = read_model(folder.model(serving.model)).card.learned
    try:
        report = check_site(survey_site(settings.data, settings.base, task))
    except (DataError, OSError) as error:
        return problem(str(error), fix)
    counts = ", ".join(
        f"{checked.num_examples} {split}" for split, checked in report.splits.items()
    )
    summary = f"{counts} examples of {len(report.class_names)} classes"
    if report.problems:
        return problem("; ".join(report.problems), fix)
    if report.warnings:
        return warning(f"{summary}; {'; '.join(report.warnings)}", fix)
    return fine(summary)


def check_model(settings: ClientSettings) -> Finding:
    """Check that the served model is whole, and that the memory was embedded by it."""
    folder = StateFolder(settings.state)
    serving = read_serving(folder.serving)
    if serving is None:
        return skipped("no model is installed yet")
    path = folder.model(serving.model)
    if not path.is_dir():
        return problem(
            f"{serving.model[:12]} is not in {folder.models}", _GET_MODEL_AGAIN
        )
    try:
        require_fingerprint(read_model(path), serving.model, str(path))
    except ModelError as error:
        return problem(
            str(error),
            f"remove {path}, and {_GET_MODEL_AGAIN}",
            "the model by which its folder is named",
        )
    return _check_memory(folder, serving)


def _check_memory(folder: StateFolder, serving: Serving) -> Finding:
    model = f"{serving.model[:12]} of {serving.run}; its fingerprint is right"
    path = folder.store
    if not (path / DATABASE).is_file():
        return warning(
            f"{model}; there is no memory in {path}",
            "knnper site onboard fills one; knnper site serve begins an empty one",
        )
    try:
        with open_store(path) as store:
            embedded_by = store.fingerprint
            count = len(store)
    except StoreError as error:
        return problem(str(error), f"see what can be read: knnper store verify {path}")
    summary = f"{model}; the memory has {count} examples"
    pending = pending_serving(folder)
    is_next = pending is not None and embedded_by == pending.model
    if embedded_by != serving.model and not is_next:
        return problem(
            f"{summary}, embedded by the model {embedded_by[:12]}",
            "start knnper site serve, which re-embeds them",
            f"examples embedded by the model that is served, {serving.model[:12]}",
        )
    return fine(f"{summary}, embedded by {'the next model' if is_next else 'it'}")


def check_service(settings: ClientSettings) -> Finding:
    """Check that the service's port is free or its own, and its token secret."""
    binding = settings.service
    if binding.port == 0:
        return fine("takes any free port")
    token = settings.state / "token"
    exposed = permission_problem(token) if token.exists() else None
    if exposed is not None:
        expected = "mode 0600; knnper site serve rejects any other"
        return from_message(Verdict.PROBLEM, exposed, expected)
    address = binding.address.on_this_machine
    opened = connected if binding.tls is None else encrypted
    try:
        with connected(address):
            pass
    except OSError:
        return fine(f"{address} is free; start it: knnper site serve")
    with contextlib.suppress(OSError), opened(address) as connection:
        if get(connection, address, "/ready").status in (200, 503):
            return fine(f"runs at {address}")
    return problem(
        f"other software has {address}",
        "end it, or set `service.port` to a free port",
        "a free port, or this client's service",
    )
