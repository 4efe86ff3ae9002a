import stat
import subprocess
from pathlib import Path

import pytest

from knnper.errors import CredentialError
from knnper.transport.credentials import (
    fingerprint,
    new_node_key,
    read_node_key,
    read_public_key,
    write_node_key,
)


def ssh_keygen(*arguments: str | Path) -> str:
    command = ["ssh-keygen", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_what_was_written_is_read(tmp_path: Path) -> None:
    key = new_node_key()
    write_node_key(tmp_path / "a.key", key)
    private = read_node_key(tmp_path / "a.key")
    assert private.private_numbers() == key.private_numbers()
    public = read_public_key(tmp_path / "a.key.pub")
    assert fingerprint(public) == fingerprint(key.public_key())
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600


def test_openssh_agrees_on_the_fingerprint(tmp_path: Path) -> None:
    key = new_node_key()
    write_node_key(tmp_path / "a.key", key)
    assert fingerprint(key.public_key()) in ssh_keygen("-l", "-f", tmp_path / "a.key")


def test_a_key_of_openssh_is_read(tmp_path: Path) -> None:
    file = tmp_path / "b.key"
    ssh_keygen("-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", file)
    public = fingerprint(read_public_key(tmp_path / "b.key.pub"))
    assert fingerprint(read_node_key(file).public_key()) == public


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-t", "ecdsa", "-N", "secret"), "without a passphrase"),
        (("-t", "ed25519", "-N", ""), "Ed25519"),
        (("-t", "ecdsa", "-m", "PEM", "-N", ""), "expected|does not hold"),
    ],
)
def test_other_private_keys(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    ssh_keygen("-q", *arguments, "-f", tmp_path / "c")
    with pytest.raises(CredentialError, match=message):
        read_node_key(tmp_path / "c")


def test_the_two_halves_are_told_apart(tmp_path: Path) -> None:
    write_node_key(tmp_path / "a.key", new_node_key())
    with pytest.raises(CredentialError, match=r"give the file that ends in \.pub"):
        read_public_key(tmp_path / "a.key")
    with pytest.raises(CredentialError, match="this is no private key"):
        read_node_key(tmp_path / "a.key.pub")


def test_a_key_pair_is_not_overwritten(tmp_path: Path) -> None:
    write_node_key(tmp_path / "a.key", new_node_key())
    before = (tmp_path / "a.key").read_bytes()
    with pytest.raises(CredentialError, match="exists already"):
        write_node_key(tmp_path / "a.key", new_node_key())
    assert (tmp_path / "a.key").read_bytes() == before
