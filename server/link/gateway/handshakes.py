"""Why clients' TLS handshakes fail, in the server's log."""

import ssl
from types import MappingProxyType
from typing import Any

from server.link.gateway.notices import Notices

_ADVICE = MappingProxyType(
    {
        "HTTP_REQUEST": "the client speaks no TLS; its settings lack `tls`",
        "WRONG_VERSION_NUMBER": "the client speaks no TLS, or another version of it",
        "TLSV1_ALERT_UNKNOWN_CA": "the client trusts another authority; copy this "
        "federation's ca.crt to it",
        "SSLV3_ALERT_BAD_CERTIFICATE": "the client does not accept the server's "
        "certificate",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED": "to the client's clock, the server's "
        "certificate has expired; renew it: knnper federation renew",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client does not accept the server's "
        "certificate",
    }
)


def reporting_tls(notices: Notices) -> type[ssl.SSLObject]:
    """Return a TLS object that says in ``notices`` why a handshake failed."""

    class ReportingTls(ssl.SSLObject):
        """The server's side of one connection; it does not know whose."""

        def do_handshake(self) -> Any:
            try:
                return super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                reason = error.reason or str(error)
                advice = _ADVICE.get(reason, "see `knnper doctor` on the client")
                notices.warn("a TLS handshake failed", reason, f"{reason} ({advice})")
                raise

    return ReportingTls
