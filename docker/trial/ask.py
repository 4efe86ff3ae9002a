"""Runs inside a container: prints what it gets of ``HOST PORT PATH`` over TLS."""

import http.client
import ssl
import sys


def asked(host: str, port: str, path: str) -> str:
    """Return the HTTP status, or ``refused`` if nothing listens there."""
    context = ssl.create_default_context(cafile="ca.crt")
    connection = http.client.HTTPSConnection(
        host, int(port), timeout=5, context=context
    )
    try:
        connection.request("GET", path)
        return str(connection.getresponse().status)
    except ConnectionRefusedError:
        return "refused"
    finally:
        connection.close()


if __name__ == "__main__":
    sys.stdout.write(asked(*sys.argv[1:]))
