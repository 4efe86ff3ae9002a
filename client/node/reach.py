"""Whether the server can be reached, and if not, which part of the way is broken."""

import socket
import ssl
from pathlib import Path

from client.node.refusal import Refusal

_TIMEOUT_S = 5.0
_REQUEST = b"GET /health HTTP/1.0\r\n\r\n"


def require_server(server: str, ca: Path | None) -> None:
    """Check address, port and certificate of the server.

    Parameters
    ----------
    server
        ``HOST:PORT``.
    ca
        Certificate of the authority that the server must be signed by; None for a
        server without TLS.

    Raises
    ------
    Refusal
        If something on the way is wrong; it says what.
    """
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    context = None if ca is None else _trusting(ca)
    try:
        with socket.create_connection((host, int(port)), _TIMEOUT_S) as connection:
            if context is None:
                _require_plain_http(connection, server)
            else:
                context.wrap_socket(connection, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        raise Refusal(_why_untrusted(error, server, ca), lasting=True) from error
    except ssl.SSLError as error:
        raise _no_tls(server, error) from error
    except socket.gaierror as error:
        raise Refusal(
            f"the name {host} cannot be resolved ({error.strerror}); correct `server`, "
            "or mend this machine's DNS"
        ) from error
    except OSError as error:
        raise Refusal(
            f"nothing answers at {server} ({error}); is the server up, is `server` its "
            "gateway's address, and does a firewall let this machine through?"
        ) from error


def _trusting(ca: Path) -> ssl.SSLContext:
    # As lenient as Flower, which is next to look at the certificate.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
        return context
    except OSError as error:  # also of a file that is no certificate
        raise Refusal(
            f"the CA's certificate {ca} cannot be read ({error}); copy the "
            "federation's ca.crt there, or correct `tls.ca`",
            lasting=True,
        ) from error


def _why_untrusted(error: ssl.SSLCertVerificationError, server: str, ca: object) -> str:
    found = f"the certificate of {server} is not accepted ({error.verify_message})"
    if "expired" in error.verify_message or "not yet valid" in error.verify_message:
        return f"{found}; renew it on the server, or set this machine's clock"
    if "match" in error.verify_message:
        return (
            f"{found}; use a name in `server` that the certificate holds, or have the "
            "server's certificate made for this one"
        )
    return (
        f"{found}; {ca} is not of the CA that signed it: copy the federation's ca.crt"
    )


def _no_tls(server: str, error: ssl.SSLError) -> Refusal:
    return Refusal(
        f"{server} does not speak TLS ({error.reason}); correct the port in `server`, "
        "or have the server started with TLS",
        lasting=True,
    )


def _require_plain_http(connection: socket.socket, server: str) -> None:
    connection.sendall(_REQUEST)
    try:
        answer = connection.recv(64)
    except ConnectionResetError:
        answer = b""
    if not answer.startswith(b"HTTP/"):
        raise Refusal(
            f"{server} does not speak plain HTTP, it probably expects TLS; remove "
            "`insecure: true` and give `tls` and `key`",
            lasting=True,
        )
