"""Make the files of a federation: of its authority, its server and its clients."""

import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from knnper.errors import CredentialError, RunError
from knnper.files import write_atomically
from knnper.server.link.authorized import AuthorizedFolder, require_name
from knnper.server.settings import read_server
from knnper.transport.credentials import (
    SERVER_DAYS,
    Address,
    hosts_of,
    issue_server_certificate,
    main_host_of,
    new_authority,
    new_node_key,
    read_certificate,
    read_identity,
    replace_node_key,
    write_certificate,
    write_node_key,
)

# File in a server's state folder that is locked while the server runs.
LOCK = "lock"
logger = logging.getLogger(__name__)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_SERVER = """\
# Settings of the server; start it with: knnper fed server server.yaml
# Relative paths are relative to this file's folder.
name: federation
listen: 0.0.0.0:{port}          # the gateway: all that clients can reach
control: 127.0.0.1:{control_port}      # Flower's own port, for commands on this machine
{security}
authorized: authorized        # one public key NAME.pub a client; read while it runs
state: state                  # what the server keeps: registrations, runs, logs
"""
_SERVER_TLS = "tls: {ca: ca.crt, certificate: server.crt, key: server.key}"
_SERVER_INSECURE = "insecure: true                # no encryption, no authentication"
_CLIENT = """\
# Settings of one client. Relative paths are relative to this file's folder.
name: "{name}"
server: {server}
{security}
state: state                  # what the client keeps: its models and its memory
data: {{name: image_folder, path: data}}  # its own data; see: knnper site check
train: true                   # false: only gets the model, does not train it
share_metrics: true           # false: the server learns no accuracy of this client
limits:                       # what a run may do here; see docs/security.md
  min_examples: 32            # different training examples behind an update, at least
  min_steps: 1                # and steps of training
  methods: null               # a list such as [knn_per, fedavg]; null: any
  models: null                # a list such as [tiny_cnn]; null: any
  experiment: null            # fingerprint of the only one: knnper site check --task
  training_rounds: 1000       # updates sent within the last `days`, over all runs
  validation_rounds: 100      # answers with metrics, likewise
  days: 30                    # null: for ever
  privacy: null               # noise and a budget of epsilon; see docs/privacy.md
service: {{host: 127.0.0.1, port: 8080}}  # where it answers predictions
"""
_CLIENT_TLS = """\
tls: {{ca: ca.crt}}             # the authority that signed the server's certificate
key: {name}.key               # proves who this client is; never leaves this machine"""
_CLIENT_INSECURE = "insecure: true                # no encryption, no authentication"
_LOCAL_HOSTS = ("localhost", "127.0.0.1")


class FederationFolder:
    """A folder with the files of the server, the authority and each client."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server = path / "server"  # to be copied to the server's machine
        self.server_file = self.server / "server.yaml"
        self.authorized = self.server / "authorized"  # clients' public keys
        # To be kept offline: its key can impersonate the server.
        self.authority = path / "ca"
        self.clients = path / "clients"

    def client(self, name: str) -> Path:
        """Return the folder to copy to the machine of the client ``name``."""
        require_name(name)
        return self.clients / name


def server_file(place: Path) -> Path:
    """Find the server's YAML file: ``place``, or in the folder ``place``."""
    if not place.is_dir():
        return place
    for file in (FederationFolder(place).server_file, place / "server.yaml"):
        if file.is_file():
            return file
    raise RunError(
        f"{place} holds no server.yaml; give the federation's folder, or the file"
    )


def federation_folder(place: Path) -> FederationFolder:
    """Find the whole federation, given its folder or its server.yaml.

    Raises
    ------
    RunError
        Only the server's part exists, as on the server's machine.
    """
    file = server_file(place)
    folder = FederationFolder(file.absolute().parent.parent)
    is_whole = folder.authority.is_dir() or folder.clients.is_dir()
    if folder.server_file != file.absolute() or not (is_whole or place == folder.path):
        raise RunError(
            f"{place} is the server's part of a federation alone; expected the folder "
            "that knnper fed init made, with `ca` and `clients` beside `server`"
        )
    return folder


def keep_to_owner(folder: Path) -> None:
    """Make ``folder``, and deny other users access to it, now and later."""
    os.umask(_OTHERS)
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    num_open = sum(_remove_permissions(path) for path in (folder, *folder.rglob("*")))
    if num_open:
        message = (
            "other users could get at %d files and folders in %s; their permissions "
            "were removed"
        )
        logger.warning(message, num_open, folder)


def _remove_permissions(path: Path) -> bool:
    """Remove other users' permissions on an own file; return whether there were any."""
    try:
        status = path.lstat()
        is_ours = status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)
        if not is_ours or not status.st_mode & _OTHERS:
            return False
        path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
    except FileNotFoundError:
        return False
    return True


def client_yaml(name: str, server: Address, insecure: bool) -> str:
    """Return the settings of a client as YAML with comments."""
    security = _CLIENT_INSECURE if insecure else _CLIENT_TLS.format(name=name)
    return _CLIENT.format(name=name, server=server, security=security)


def create_federation(
    folder: FederationFolder,
    hosts: Sequence[str],
    port: int = 8443,
    control_port: int = 8000,
    insecure: bool = False,
    days: int = SERVER_DAYS,
) -> None:
    """Write the files of the server, known as ``hosts``, and of the authority."""
    if folder.server_file.exists():
        mend = f"another folder, or: knnper fed add-client {folder.path} NAME"
        raise RunError(f"{folder.path} holds a federation already; choose {mend}")
    folder.authorized.mkdir(parents=True, exist_ok=True)
    if not insecure:
        folder.authority.mkdir(mode=0o700, exist_ok=True)
        authority = new_authority(f"{folder.path.resolve().name} authority")
        authority.write(folder.authority / "ca.crt", folder.authority / "ca.key")
        write_certificate(folder.server / "ca.crt", authority.certificate)
        server = issue_server_certificate(authority, (*hosts, *_LOCAL_HOSTS), days)
        server.write(*_server_files(folder))
    security = _SERVER_INSECURE if insecure else _SERVER_TLS
    text = _SERVER.format(port=port, control_port=control_port, security=security)
    write_atomically(folder.server_file, text)


def add_client(
    folder: FederationFolder, name: str, server: Address, num_train: int | None = None
) -> Path:
    """Write the files of a new client, and authorize it; return its folder."""
    require_name(name)
    insecure = read_server(folder.server_file).insecure
    place = folder.client(name)
    if place.exists():
        raise CredentialError(f"{place} exists already; choose another name")
    if insecure and num_train is not None:
        raise RunError("found --num-train, expected none in a federation without keys")
    key = new_node_key()
    if not insecure:
        AuthorizedFolder(folder.authorized).add(name, key.public_key(), num_train)
    place.mkdir(parents=True)
    text = client_yaml(name, server, insecure)
    write_atomically(place / "client.yaml", text)
    if not insecure:
        write_node_key(place / f"{name}.key", key)
        authority = read_certificate(folder.server / "ca.crt")
        write_certificate(place / "ca.crt", authority)
    return place


def rotate_key(folder: FederationFolder, name: str) -> Path:
    """Make a new key for a client, and revoke the old one; return the key's file.

    An interrupted call can be repeated.
    """
    if read_server(folder.server_file).insecure:
        raise RunError("a federation with `insecure: true` has no keys")
    authorized = AuthorizedFolder(folder.authorized)
    authorized.require_known(name)
    path, key = folder.client(name) / f"{name}.key", new_node_key()
    if not path.exists():
        raise RunError(
            f"there is no {path}: the client made its key itself. Have it make another "
            "one, and give its public half: knnper fed rotate-key FEDERATION "
            f"{name} {name}.key.pub"
        )
    replace_node_key(path, key)
    authorized.replace(name, key.public_key())
    return path


def renew(folder: FederationFolder, hosts: Sequence[str], days: int) -> list[str]:
    """Make a new certificate and key; the old files get the suffix ``.old``.

    Returns the names in the certificate: the present names and ``hosts``.
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


def gateway_address(folder: FederationFolder, host: str | None) -> Address:
    """Return the address at which clients reach the gateway."""
    settings = read_server(folder.server_file)
    port = settings.listen_address.port
    if host is not None:
        return Address(host, port)
    if settings.insecure:
        raise RunError(
            "without a certificate the server has no known name; give --host"
        )
    return Address(main_host_of(read_certificate(_server_files(folder)[0])), port)


def _server_files(folder: FederationFolder) -> tuple[Path, Path]:
    return folder.server / "server.crt", folder.server / "server.key"
