"""Makes the files of a federation: of its authority, its server and its clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from knnper.config.address import Address
from knnper.config.errors import CredentialError, RunError
from knnper.transport.credentials.certificates import (
    AUTHORITY_DAYS,
    SERVER_DAYS,
    hosts_of,
    issue_server_certificate,
    main_host_of,
    new_authority,
    read_certificate,
    read_identity,
    write_certificate,
)
from knnper.transport.credentials.node_keys import new_node_key, write_node_key
from server.link.authorized import AuthorizedFolder, require_name
from server.link.layout import FederationFolder
from server.link.templates import client_yaml, server_yaml
from server.settings import read_server

_LOCAL_HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Founding:
    """What a new federation is to be.

    Attributes
    ----------
    hosts
        Names and addresses of the server's machine; clients are told the first.
    port
        The gateway's.
    control_port
        Flower's own, on the server's machine only.
    insecure
        Whether to do without certificates and keys.
    server_days, authority_days
        How long the certificates are valid.
    """

    hosts: Sequence[str]
    port: int = 8443
    control_port: int = 8000
    insecure: bool = False
    server_days: int = SERVER_DAYS
    authority_days: int = AUTHORITY_DAYS


def found(folder: FederationFolder, founding: Founding) -> None:
    """Write the files of the server and of the authority.

    Raises
    ------
    RunError
        If there is a federation already.
    """
    if folder.server_file.exists():
        raise RunError(
            f"{folder.path} holds a federation already; choose another folder, or add "
            f"clients with: knnper federation add-client {folder.path} NAME"
        )
    folder.authorized.mkdir(parents=True, exist_ok=True)
    if not founding.insecure:
        _write_authority(folder, founding)
    text = server_yaml(founding.port, founding.control_port, founding.insecure)
    folder.server_file.write_text(text, encoding="utf-8")


def add_client(
    folder: FederationFolder, name: str, server: Address, num_train: int | None = None
) -> Path:
    """Write the files of a new client and let it in; return the client's folder.

    Parameters
    ----------
    folder
        The federation's.
    name
        The client's.
    server
        Where the client finds the gateway.
    num_train
        On how many examples it trains, whatever it says; None takes its word for it.

    Raises
    ------
    CredentialError
        If the name is not allowed or taken.
    RunError
        If the number is given where nobody proves to be that client.
    """
    require_name(name)
    insecure = read_server(folder.server_file).insecure
    place = folder.client(name)
    if place.exists():
        raise CredentialError(f"{place} exists already; choose another name")
    if insecure and num_train is not None:
        raise RunError(
            "found --num-train for a federation without keys, where anyone may go by "
            "the name; leave it away"
        )
    key = None if insecure else new_node_key()
    if key is not None:
        AuthorizedFolder(folder.authorized).add(name, key.public_key(), num_train)
    place.mkdir(parents=True)
    text = client_yaml(name, server, insecure)
    (place / "client.yaml").write_text(text, encoding="utf-8")
    if key is not None:
        _write_credentials(folder, place / f"{name}.key", key)
    return place


def renew(folder: FederationFolder, hosts: Sequence[str], days: int) -> list[str]:
    """Give the server a new certificate and key; the old ones get the suffix ``.old``.

    Parameters
    ----------
    folder
        The federation's.
    hosts
        Names and addresses to add to those of the present certificate.
    days
        How long the new one is valid.

    Returns
    -------
    list of str
        All names and addresses of the new certificate.

    Raises
    ------
    CredentialError
        If the authority's certificate or key cannot be read.
    """
    authority = read_identity(folder.authority / "ca.crt", folder.authority / "ca.key")
    certificate, key = _server_files(folder)
    present = hosts_of(read_certificate(certificate))
    names = list(dict.fromkeys([*present, *hosts]))
    identity = issue_server_certificate(authority, names, days)
    for file in (certificate, key):
        file.replace(file.with_name(f"{file.name}.old"))
    identity.write(certificate, key)
    return names


def known_server(folder: FederationFolder, host: str | None) -> Address:
    """Return where clients find the gateway.

    Parameters
    ----------
    folder
        The federation's.
    host
        Name or address of the server's machine; None for the first of its
        certificate.

    Raises
    ------
    RunError
        Without ``host``, if there is no certificate.
    """
    settings = read_server(folder.server_file)
    port = settings.listen_address.port
    if host is not None:
        return Address(host, port)
    if settings.insecure:
        raise RunError(
            "this federation has no certificate that names its server; give --host"
        )
    return Address(main_host_of(read_certificate(_server_files(folder)[0])), port)


def _write_authority(folder: FederationFolder, founding: Founding) -> None:
    folder.authority.mkdir(mode=0o700, exist_ok=True)
    name = f"{folder.path.resolve().name} authority"
    authority = new_authority(name, founding.authority_days)
    authority.write(folder.authority / "ca.crt", folder.authority / "ca.key")
    write_certificate(folder.server / "ca.crt", authority.certificate)
    hosts = (*founding.hosts, *_LOCAL_HOSTS)
    server = issue_server_certificate(authority, hosts, founding.server_days)
    server.write(*_server_files(folder))


def _write_credentials(
    folder: FederationFolder, key_file: Path, key: ec.EllipticCurvePrivateKey
) -> None:
    write_node_key(key_file, key)
    authority = read_certificate(folder.server / "ca.crt")
    write_certificate(key_file.parent / "ca.crt", authority)


def _server_files(folder: FederationFolder) -> tuple[Path, Path]:
    return folder.server / "server.crt", folder.server / "server.key"
