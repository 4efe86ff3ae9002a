"""What the doctor finds at a client: its own machine, then the server."""

import json
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest

from knnper.client.activation import Activation, lock_state
from knnper.client.doctor import client_checks
from knnper.client.limits import note_refusal
from knnper.client.runtime import Personalized
from knnper.client.settings import read_client
from knnper.client.site import installer_of
from knnper.client.site_state import SiteState
from knnper.experiment_file import load_experiment
from knnper.files import write_atomically
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.core.assembly import assemble
from knnper.strategies.core.exported_model import ModelError, save_model
from knnper.strategies.core.records import ModelPayload
from knnper.transport.credentials import (
    CertifiedKey,
    fingerprint,
    issue_server_certificate,
    new_authority,
    new_node_key,
    write_node_key,
)
from knnper.transport.diagnosis import GATEWAY_HEADERS, Finding, Verdict, examine
from tests.client.doctor.scripted_server import (
    Script,
    answering,
    assert_finding,
    client,
    look,
    saying,
    written,
)
from tests.client.state import small_site
from tests.client.state.small_site import NAME, SPEC, small_experiment, small_model

MODEL = small_model()
OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM
SKIPPED = Verdict.SKIPPED


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return client(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def site_state(folder: Path) -> SiteState:
    """Return the state of a client that serves a model."""
    site_state = SiteState(folder, NAME)
    site_state.install(MODEL, small_site.site(), took_part=True)
    return site_state


def port(address: str) -> str:
    return f"service.port={address.rpartition(':')[2]}"


@pytest.fixture
def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return port(f"127.0.0.1:{listening.getsockname()[1]}")


@pytest.mark.parametrize("exists", [False, True])
def test_no_data(file: Path, exists: bool) -> None:
    if exists:
        (file.parent / "data").mkdir()
    state = "no examples" if exists else "does not exist"
    assert_finding(look(file, "data"), PROBLEM, state, f"knnper site check {file}")


def test_finding_for_a_used_service_port(file: Path, free_port: str) -> None:
    assert_finding(look(file, "service", free_port), OK, "is free")
    with answering(Script(answers={"/ready": (503, "{}")}), None) as address:
        assert_finding(look(file, "service", port(address)), OK, f"runs at {address}")
    with answering(Script(), None) as address:
        finding = look(file, "service", port(address))
    assert_finding(
        finding, PROBLEM, f"other software has {address}", "set `service.port`"
    )


def test_a_token_that_others_can_read(file: Path, folder: Path, free_port: str) -> None:
    token = folder / "token"
    folder.mkdir()
    token.write_text("secret")
    token.chmod(0o640)
    assert_finding(
        look(file, "service", "service.port=0"), OK
    )  # the port is not asked for
    assert_finding(look(file, "service", free_port), PROBLEM, mend=f"chmod 600 {token}")


def kept(file: Path) -> Finding:
    """Return the finding about the model and its memory, once the folder is checked."""
    checks = [
        check
        for check in client_checks(read_client(file))
        if check.subject in ("folder", "model")
    ]
    return examine(checks)[1].finding


def test_new_state_folder(file: Path, folder: Path) -> None:
    for subject in ("folder", "refusals"):
        assert_finding(look(file, subject), OK)
    assert_finding(look(file, "model"), SKIPPED)
    assert not folder.exists()


def test_the_folder_of_another_client_or_key(file: Path, folder: Path) -> None:
    def owner(file: Path) -> Finding:
        checks = client_checks(read_client(file))
        return examine([check for check in checks if check.subject == "folder"])[
            0
        ].finding

    SiteState(folder, "site-b")
    mend = "give every client a `state` folder of its own"
    assert_finding(owner(file), PROBLEM, "is the state of the client 'site-b'", mend)
    (folder / "identity.json").unlink()
    write_node_key(folder.parent / "site-a.key", new_node_key())
    SiteState(folder, NAME, fingerprint(new_node_key().public_key()))
    assert_finding(
        owner(client(folder.parent, tls=True)), PROBLEM, mend="bring the key back"
    )


def test_refusals_are_reported(file: Path, folder: Path) -> None:
    for about, reason, verdict, mend in (
        ("client", "its key is registered as site-b", WARNING, "remove"),
        ("run", "the model mlp", WARNING, "client.yaml"),
        ("model", "expected the model 12, found 34", PROBLEM, "the same versions"),
    ):
        note_refusal(folder, about, reason)  # type: ignore[arg-type]
        assert_finding(look(file, "refusals"), verdict, reason, mend)


def test_a_refusal_from_before_the_model_is_past(
    file: Path, site_state: SiteState
) -> None:
    line = '{"time": "2001-01-01T00:00:00+00:00", "about": "model", "reason": "x"}\n'
    (site_state.folder.path / "refusals.jsonl").write_text(line)
    assert_finding(look(file, "refusals"), OK)


def test_a_model_and_a_memory_as_they_should_be(
    file: Path, site_state: SiteState
) -> None:
    assert_finding(kept(file), OK, MODEL.fingerprint[:12])
    assert_finding(kept(file), OK, "50 examples, embedded by it")
    site_state.folder.store.rename(site_state.folder.path / "gone")
    assert_finding(kept(file), WARNING, "there is no memory")


def test_the_served_model_is_missing_damaged_or_another(
    file: Path, site_state: SiteState
) -> None:
    folder, other = site_state.folder.model(MODEL.fingerprint), small_model(seed=1)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert_finding(kept(file), PROBLEM, "it was damaged or replaced")
    folder.rename(site_state.folder.path / "elsewhere")
    assert_finding(kept(file), PROBLEM, "not in", "knnper site onboard --model FOLDER")
    save_model(folder, other)
    fingerprint_text = f"found {other.fingerprint[:12]}"
    for words in (f"expected the model {MODEL.fingerprint[:12]}", fingerprint_text):
        assert_finding(kept(file), PROBLEM, words)


def test_a_memory_of_another_model(file: Path, site_state: SiteState) -> None:
    other = small_model(seed=1)
    save_model(site_state.folder.model(other.fingerprint), other)
    text = site_state.folder.serving.read_text()
    changed = text.replace(MODEL.fingerprint, other.fingerprint)
    write_atomically(site_state.folder.serving, changed)
    finding = kept(file)
    assert_finding(finding, PROBLEM, MODEL.fingerprint[:12], "start knnper site serve")
    assert other.fingerprint[:12] in finding.expected


def test_a_folder_that_others_can_look_into(file: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    assert_finding(look(file, "folder"), OK)
    folder.chmod(0o750)
    assert_finding(look(file, "folder"), WARNING, mend=f"chmod 700 {folder}")


def test_unannounced_model_is_refused_and_reported(
    file: Path,
) -> None:
    experiment = load_experiment(small_experiment(), experiment_catalogue())
    assembly = assemble(experiment, SPEC)
    handed = ModelPayload(assembly.task.initial_weights)
    settings, data = read_client(file), small_site.site()
    keep = installer_of(settings, assembly, data, expected="0" * 64)
    with pytest.raises(ModelError, match="expected the model 000000000000"):
        keep(cast(Personalized, SimpleNamespace(reference=handed)))
    assert_finding(
        look(file, "refusals"), PROBLEM, "expected the model", "the same versions"
    )
    assert_finding(look(file, "model"), SKIPPED)  # nothing of it is installed


AUTHORITY = new_authority("CA of the federation")
SERVER = issue_server_certificate(AUTHORITY, ["127.0.0.1"])


def asked(
    folder: Path,
    subject: str,
    script: Script | None = None,
    serves: CertifiedKey | None = None,
    ca: CertifiedKey | None = None,
) -> Finding:
    """Return what is found of a server, with TLS if the client trusts ``ca``."""
    files = None if serves is None else written(folder, serves, "server")
    if ca is not None:
        written(folder, ca, "ca")
    with answering(script or Script(), files) as address:
        return look(client(folder, address, tls=ca is not None), subject)


@pytest.mark.parametrize(
    ("error", "cause", "mend"),
    [
        (ConnectionRefusedError(), "nothing listens at", "start the server there"),
        (TimeoutError("timed out"), "", "let TCP port 1 through the firewalls"),
        (OSError(113, "No route to host"), "", "fix this machine's network"),
    ],
)
def test_no_way_to_the_server(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: OSError,
    cause: str,
    mend: str,
) -> None:
    def fail(*args: object) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    assert_finding(look(client(tmp_path), "server"), PROBLEM, cause, mend)


def signed(host: str = "127.0.0.1", days: int = 100) -> CertifiedKey:
    return issue_server_certificate(AUTHORITY, [host], days=days)


Ends = tuple[CertifiedKey | None, CertifiedKey | None]
NEITHER: Ends = (None, None)
SOON, EXPIRED = (signed(days=10), AUTHORITY), (signed(days=-1), AUTHORITY)
OTHER_HOST = (signed("a.org"), AUTHORITY)
WELL, DOWN = Script(), Script(answers={"/health": (503, "")})
FLOWERS_OWN = Script({}, {"/health": (200, ""), "/v1/control/list-nodes": (405, "")})
OLD = Script({GATEWAY_HEADERS["knnper"]: "0.1.0", GATEWAY_HEADERS["flwr"]: "1.30.0"})
# This machine's clock is a day ahead: only by it the certificate has expired.
EARLIER = Script(ahead_s=-timedelta(days=1).total_seconds() - 600)
WRONG: list[tuple[str, Script, Ends, tuple[Verdict, str, str]]] = [
    ("tls", WELL, (SERVER, None), (PROBLEM, "speaks TLS", "remove `insecure: true`")),
    ("tls", WELL, (None, AUTHORITY), (PROBLEM, "HTTP without TLS", "with `tls`")),
    ("tls", WELL, NEITHER, (WARNING, "insecure: true", "fed init")),
    ("gateway", FLOWERS_OWN, NEITHER, (PROBLEM, "Flower's own", "correct `server`")),
    ("gateway", Script({}, {}), NEITHER, (PROBLEM, "status 404", "correct `server`")),
    ("gateway", Script({}), NEITHER, (WARNING, "no gateway of", "correct `server`")),
    ("gateway", DOWN, NEITHER, (PROBLEM, "Flower behind it does", "superlink.log")),
    ("version", OLD, NEITHER, (PROBLEM, "flwr 1.30.0 on the server", "same versions")),
    ("certificate", WELL, SOON, (WARNING, "expires on", "knnper fed renew")),
    ("certificate", WELL, EXPIRED, (PROBLEM, "expired on", "knnper fed renew")),
    ("certificate", WELL, OTHER_HOST, (PROBLEM, "not for 127.", "--host 127.0.0.1")),
    ("certificate", EARLIER, EXPIRED, (PROBLEM, "valid at the server's", "set this")),
]


@pytest.mark.parametrize(("subject", "script", "ends", "expected"), WRONG)
def test_what_is_wrong_with_the_server(
    tmp_path: Path,
    subject: str,
    script: Script,
    ends: Ends,
    expected: tuple[Verdict, str, str],
) -> None:
    assert_finding(asked(tmp_path, subject, script, *ends), *expected)


@pytest.mark.parametrize("tls", [True, False])
def test_software_that_speaks_neither(tmp_path: Path, tls: bool) -> None:
    with saying(b"SSH-2.0-OpenSSH_9.6\r\n") as server:
        finding = look(client(tmp_path, server, tls), "tls")
    assert_finding(finding, PROBLEM, "other software has the port", "correct `server`")


@pytest.mark.parametrize(
    ("server_ahead_s", "verdict", "direction"),
    [
        (-3.5, WARNING, "ahead of"),
        (-30, PROBLEM, "ahead of"),
        (200, WARNING, "behind"),
        (400, PROBLEM, "behind"),
    ],
)
def test_clocks(
    tmp_path: Path, server_ahead_s: float, verdict: Verdict, direction: str
) -> None:
    finding = asked(tmp_path, "clock", Script(ahead_s=server_ahead_s))
    assert_finding(finding, verdict, direction, "NTP")
    # The server tells whole seconds.
    clock_error = finding.found.split(" clock is ")[1].split(" s ")[0]
    assert abs(float(clock_error) - abs(server_ahead_s)) <= 0.75


def test_another_authority_and_all_that_is_wrong(tmp_path: Path) -> None:
    server = issue_server_certificate(AUTHORITY, ["example.org"], days=-1)
    other = new_authority("another CA")
    finding = asked(tmp_path, "certificate", None, server, other)
    for words in ("expired on", "not for 127.0.0.1", "not signed by CN=another CA"):
        assert_finding(finding, PROBLEM, words, "copy the ca.crt")


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    ca = tmp_path / "ca.crt"
    if content is not None:
        ca.write_text(content)
    finding = look(client(tmp_path, tls=True), "certificate")
    assert_finding(finding, PROBLEM, str(ca), "copy the federation's ca.crt there")


def test_an_expired_authority(tmp_path: Path) -> None:
    written(tmp_path, new_authority("old CA", days=-1), "ca")
    finding = look(client(tmp_path, tls=True), "certificate")
    assert_finding(finding, PROBLEM, "of the authority, the certificate expired on")


# What Flower answers to a key that it knows, and to one that it does not.
KNOWN = {"code": 2003, "detail": "Invalid heartbeat interval."}
UNKNOWN = {"code": 2004, "detail": "Failed to activate SuperNode."}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    write_node_key(tmp_path / "site-a.key", new_node_key())
    return tmp_path / "site-a.key"


def registered(key: Path, status: int, body: object) -> Finding:
    """Return what is found when the server answers with ``body``."""
    answers = {"/v1/fleet/activate-node": (status, json.dumps(body))}
    script = Script(answers=answers)
    finding = asked(key.parent, "registration", script, SERVER, AUTHORITY)
    (sent,) = script.bodies
    # Flower refuses this one before it changes anything.
    assert ActivateNodeRequest.FromString(sent).heartbeat_interval == 0
    return finding


def standing(name: str, idle_s: float | None) -> dict[str, object]:
    return {**KNOWN, "standing": {"name": name, "idle_s": idle_s}}


def test_a_key_as_it_should_be_and_one_that_others_can_read(key: Path) -> None:
    file = client(key.parent, tls=True)
    assert_finding(look(file, "key"), OK, "SHA256:")
    key.chmod(0o644)
    assert_finding(look(file, "key"), WARNING, mend=f"chmod 600 {key}")


@pytest.mark.parametrize("content", [None, "no key", "pub"])
def test_a_key_that_is_none(key: Path, content: str | None) -> None:
    public = key.with_name("site-a.key.pub").read_text()
    key.unlink()
    if content is not None:
        key.write_text(public if content == "pub" else content)
    mend = "fed register FEDERATION site-a site-a.key.pub"
    assert_finding(look(client(key.parent, tls=True), "key"), PROBLEM, str(key), mend)


@pytest.mark.parametrize(
    ("status", "body", "verdict", "cause", "mend"),
    [
        (412, UNKNOWN, PROBLEM, "is not registered", "send site-a.key.pub"),
        (400, standing("site-a", None), OK, "registered as site-a", ""),
        # A server without the gateway tells no name.
        (400, KNOWN, OK, "", ""),
        (400, standing("site-b", None), PROBLEM, "as site-b, and", "`name: site-b`"),
        (400, standing("site-a", 3.2), PROBLEM, "3 s ago", "stop the other node"),
        (400, standing("site-a", 61.0), OK, "", ""),
        (401, {"detail": "x", "extra": "9 s ahead"}, PROBLEM, "9 s ahead", "clocks"),
        (500, {}, PROBLEM, "HTTP status 500", ""),
    ],
)
def test_what_the_server_says_of_a_key(
    key: Path, status: int, body: object, verdict: Verdict, cause: str, mend: str
) -> None:
    assert_finding(registered(key, status, body), verdict, cause, mend)


def test_the_own_node_is_no_second_one(key: Path) -> None:
    state = key.parent / "state"
    with lock_state(state):
        finding = registered(key, 400, standing("site-a", 0.1))
        assert_finding(finding, OK, "its node runs")
        Activation.of(state).note(7)
    finding = registered(key, 400, standing("site-a", 3.0))
    assert_finding(finding, WARNING, "did not leave in order")


def test_no_answer(key: Path) -> None:
    written(key.parent, AUTHORITY, "ca")
    finding = look(client(key.parent, tls=True), "registration")
    assert finding.found == "the server did not answer"
