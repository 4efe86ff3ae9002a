"""Clients that are not let in, or refuse: both sides say why."""

import shutil
from collections.abc import Callable

import pytest

from knnper.server.link.setup import FederationFolder
from knnper.transport.credentials import (
    issue_server_certificate,
    new_authority,
    new_node_key,
    read_identity,
    write_certificate,
    write_node_key,
)
from tests.federation.site_tricks import DISTRIBUTING, TAMPER
from tests.federation.small_federation import SEEN, Federation, Found
from tests.processes import Running

pytestmark = pytest.mark.slow
HONEST, TAMPERED, IMPOSTOR = SEEN
REFUSED = 1
OF_ANOTHER = f"the key is registered as {HONEST}, and `name` is {IMPOSTOR}"


def test_each_side_says_why_a_client_is_not_let_in(found: Found) -> None:
    federation = found()
    server = federation.server()
    for change, to_client, in_doctor, to_server in (
        (_without_tls, "it probably expects TLS; remove `insec", "TLS", "no TLS"),
        (
            _with_other_authority,
            "is not of the CA that signed it",
            "ca.crt",
            "s ca.crt",
        ),
        (_with_unknown_key, "not registered there", "not registered", "not registered"),
    ):
        _require_refused(federation, change, to_client, in_doctor)
        server.wait_for(to_server, 10)
    federation.clients(HONEST)
    _require_refused(
        federation, _with_key_of_another, "a node with this key is online", OF_ANOTHER
    )
    server.wait_for(f"{HONEST} is connected already", 10)
    _let_certificate_expire(federation)
    server.wait_for("the gateway uses the new certificate", 30)
    _require_refused(federation, _unchanged, "certificate has expired", "expired")
    server.wait_for("knnper fed renew", 10)


def test_a_taken_name_and_a_model_that_was_changed(found: Found) -> None:
    federation = found()
    federation.configure(IMPOSTOR, name=HONEST)
    federation.tricks(TAMPERED).plan({DISTRIBUTING: TAMPER})
    federation.server()
    nodes = federation.clients()
    submitted, run = federation.submit("run.federation.min_clients=2")
    assert submitted.wait() == 0
    objection = f"its key is registered as {IMPOSTOR}, and it calls itself {HONEST}"
    assert f"is refused: {objection}" in federation.run_log
    nodes[IMPOSTOR].wait_for(f"the server refuses this client: .*{objection}", 30)
    noted = federation.client_folder(IMPOSTOR) / "state/refusals.jsonl"
    assert objection in noted.read_text()
    assert set(run.clients) == {HONEST}
    assert run.results["model_distribution"]["offline"] == [TAMPERED]
    wrong = "the model that the server distributed: expected the model"
    assert f"client {TAMPERED} could not personalise: {wrong}" in (federation.run_log)
    assert wrong in nodes[TAMPERED].written
    assert not (federation.client_folder(TAMPERED) / "state/serving.json").exists()


def _require_refused(
    federation: Federation,
    change: Callable[[Federation], None],
    words: str,
    in_doctor: str,
) -> None:
    """A client that is changed so ends at once and says why; so does the doctor."""
    folder = federation.client_folder(IMPOSTOR)
    before = folder.with_name("before")
    shutil.copytree(folder, before)
    change(federation)
    node: Running = federation.client(IMPOSTOR, "--patience", "0")
    assert node.wait() == REFUSED
    assert words in " ".join(node.written.split())
    assert "Traceback" not in node.written
    doctor = federation.start(
        IMPOSTOR, "doctor", "site", "doctor", federation.client_file(IMPOSTOR)
    )
    assert doctor.wait() == REFUSED
    assert in_doctor in " ".join(doctor.written.split())
    shutil.rmtree(folder)
    before.rename(folder)


def _unchanged(federation: Federation) -> None:
    pass


def _without_tls(federation: Federation) -> None:
    federation.configure(IMPOSTOR, tls=None, key=None, insecure=True)


def _with_other_authority(federation: Federation) -> None:
    ca = federation.client_folder(IMPOSTOR) / "ca.crt"
    ca.unlink()
    write_certificate(ca, new_authority("another").certificate)


def _with_unknown_key(federation: Federation) -> None:
    key = federation.client_folder(IMPOSTOR) / "stranger.key"
    write_node_key(key, new_node_key())
    federation.configure(IMPOSTOR, key=key.name)


def _with_key_of_another(federation: Federation) -> None:
    key = federation.client_folder(HONEST) / f"{HONEST}.key"
    federation.configure(IMPOSTOR, key=str(key))


def _let_certificate_expire(federation: Federation) -> None:
    place = FederationFolder(federation.folder)
    authority = read_identity(place.authority / "ca.crt", place.authority / "ca.key")
    expired = issue_server_certificate(authority, ["127.0.0.1"], days=-1)
    files = place.server / "server.crt", place.server / "server.key"
    for file in files:
        file.unlink()
    expired.write(*files)
