import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

from knnper.server.settings import TlsFiles
from knnper.transport.credentials import (
    Address,
    Identity,
    issue_server_certificate,
    new_authority,
    write_certificate,
)
from tests.processes import LOCALHOST, wait_until
from tests.server.link.gateway_stage import KEY, NODE, Stage, gateway_stage
from tests.server.link.peers import Peer

AUTHORITY = new_authority("test authority")


def files(folder: Path, hosts: Sequence[str] = (LOCALHOST,), days: int = 9) -> TlsFiles:
    tls = TlsFiles(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    for file in (tls.ca, tls.certificate, tls.key):
        file.unlink(missing_ok=True)
    write_certificate(tls.ca, AUTHORITY.certificate)
    issue_server_certificate(AUTHORITY, hosts, days).write(tls.certificate, tls.key)
    return tls


def trusting(authority: Identity, folder: Path) -> ssl.SSLContext:
    file = folder / "trusted.crt"
    write_certificate(file, authority.certificate)
    return ssl.create_default_context(cafile=file)


def shown_certificate(address: Address, context: ssl.SSLContext) -> int:
    """Return the serial number of the certificate that the gateway shows."""
    place = (address.host, address.port)
    with (
        socket.create_connection(place, timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=address.host) as connection,
    ):
        found = connection.getpeercert()
        assert found is not None
        return int(str(found["serialNumber"]), 16)


def test_a_client_that_trusts_the_authority_is_let_through(tmp_path: Path) -> None:
    with gateway_stage(tls=files(tmp_path)) as stage:
        context = trusting(AUTHORITY, tmp_path)
        with httpx.Client(base_url=f"https://{stage.address}", verify=context) as http:
            client = Peer(KEY, http, NODE)
            beat = SendNodeHeartbeatRequest(node=client.node, heartbeat_interval=30)
            assert client.post("send-node-heartbeat", beat).is_success
            stage.upstream.content = large = bytes(5_000_000)
            assert client.post("send-node-heartbeat", beat).content == large
            assert http.post("/v1/control/start-run", content=b"").status_code == 403


def test_clients_that_are_idle_do_not_hold_up_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gateway_stage(tls=files(tmp_path)) as stage:
        context = trusting(AUTHORITY, tmp_path)
        http = httpx.Client(base_url=f"https://{stage.address}", verify=context)
        assert http.get("/health").is_success
        began = time.monotonic()
    assert time.monotonic() - began < 4
    assert "graceful shutdown exceeded" not in caplog.text
    http.close()


def test_without_tls_to_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gateway_stage(tls=files(tmp_path)) as stage:
        with pytest.raises(httpx.TransportError):
            stage.http.get("/health")
        wait_until(lambda: "the client speaks no TLS" in caplog.text)
        assert stage.upstream.seen == []


Change = Callable[[Path], tuple[TlsFiles, Identity]]


@pytest.mark.parametrize(
    ("change", "to_client", "to_server"),
    [
        (
            lambda folder: (files(folder), new_authority("other")),
            "self-signed certificate|unable to get local issuer",
            "copy this federation's ca.crt",
        ),
        (
            lambda folder: (files(folder, days=-1), AUTHORITY),
            "certificate has expired",
            "knnper fed renew",
        ),
        (
            lambda folder: (files(folder, hosts=("other.example.org",)), AUTHORITY),
            "IP address mismatch",
            "does not accept the server's certificate",
        ),
    ],
    ids=["wrong authority", "expired", "wrong host"],
)
def test_untrusted_certificates_are_named_on_both_sides(
    change: Change,
    to_client: str,
    to_server: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tls, trusted = change(tmp_path)
    with gateway_stage(tls=tls) as stage:
        context = trusting(trusted, tmp_path)
        with pytest.raises(ssl.SSLCertVerificationError, match=to_client):
            shown_certificate(stage.address, context)
        wait_until(lambda: to_server in caplog.text)


def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    with gateway_stage(tls=files(tmp_path)) as stage:
        minimum = stage.listener.config.ssl
        assert minimum is not None
        assert minimum.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    with gateway_stage(tls=files(tmp_path)) as stage:
        context = trusting(AUTHORITY, tmp_path)
        before = shown_certificate(stage.address, context)
        tls = files(tmp_path)
        stage.listener.renew()
        renewed = shown_certificate(stage.address, context)
        assert renewed != before
        _refuses_half(stage, tls)
        assert shown_certificate(stage.address, context) == renewed


def _refuses_half(stage: Stage, tls: TlsFiles) -> None:
    """See that a certificate without its key changes nothing."""
    tls.certificate.unlink()
    other = issue_server_certificate(AUTHORITY, (LOCALHOST,))
    write_certificate(tls.certificate, other.certificate)
    with pytest.raises(OSError, match="KEY_VALUES_MISMATCH"):
        stage.listener.renew()
