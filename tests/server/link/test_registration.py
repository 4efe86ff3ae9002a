import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from knnper.audit_log import AuditLog
from knnper.errors import CredentialError, RunError
from knnper.server.link.authorized import AuthorizedFolder, read_roster
from knnper.server.link.registration import (
    UNREGISTERED,
    ControlPort,
    RegisteredNode,
    reconcile,
)
from knnper.server.link.setup import FederationFolder
from knnper.transport.credentials import fingerprint, new_node_key


@dataclass
class Flower(ControlPort):
    """Registers as Flower does: a key once and for ever."""

    known: list[RegisteredNode] = field(default_factory=list)

    def nodes(self) -> list[RegisteredNode]:
        return list(self.known)

    def register(self, name: str, key: ec.EllipticCurvePublicKey) -> str:
        assert fingerprint(key) not in {node.key_sha256 for node in self.known}
        number = str(2**63 + len(self.known))
        self.known.append(RegisteredNode(number, name, fingerprint(key), "registered"))
        return number

    def unregister(self, node_id: str) -> None:
        self.known = [
            RegisteredNode(node.node_id, node.name, node.key_sha256, UNREGISTERED)
            if node.node_id == node_id
            else node
            for node in self.known
        ]


def public_key() -> ec.EllipticCurvePublicKey:
    return new_node_key().public_key()


@dataclass(frozen=True)
class Place:
    """Folder, Flower and roster of one server."""

    folder: AuthorizedFolder
    flower: Flower
    roster: Path

    def names(self) -> list[str]:
        """Return the names of the registered clients, sorted, after a look."""
        roster = reconcile(self.folder, self.flower, self.roster)
        assert read_roster(self.roster) == roster
        return sorted(client.name for client in roster.values())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    folder = AuthorizedFolder(tmp_path / "authorized")
    folder.path.mkdir()
    return Place(folder, Flower(), tmp_path / "roster.json")


def test_audit_log_has_registrations_and_revocations(place: Place) -> None:
    key = public_key()
    place.folder.add("site-a", key)
    place.names()
    place.folder.remove("site-a")
    place.names()
    place.names()
    entries = AuditLog.of(place.roster.parent).entries()
    events = [(entry["event"], entry["client"], entry["key"]) for entry in entries]
    assert events == [
        ("register_client", "site-a", fingerprint(key)),
        ("revoke_client", "site-a", fingerprint(key)),
    ]


def test_a_client_comes_and_leaves_with_its_file(place: Place) -> None:
    assert place.names() == []
    place.folder.add("site-a", public_key())
    assert place.names() == ["site-a"]
    place.folder.add("site-b", public_key())
    assert place.names() == ["site-a", "site-b"]
    place.folder.remove("site-a")
    assert place.names() == ["site-b"]
    assert [node.status for node in place.flower.known] == [UNREGISTERED, "registered"]


def test_a_number_that_the_operator_fixed_is_in_the_roster(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    for name, fixed in (("a", 1200), ("b", None), ("c", 7), ("d", 7)):
        place.folder.add(name, public_key(), fixed)
    place.names()
    (place.folder.path / "b.num_train").write_text("  300\n")
    (place.folder.path / "c.num_train").write_text("many")
    (place.folder.path / "d.num_train").unlink()
    place.names()
    entries = read_roster(place.roster).values()
    numbers = {entry.name: entry.num_train for entry in entries}
    assert numbers == {"a": 1200, "b": 300, "c": None, "d": None}
    assert "c.num_train: expected a number of training examples" in caplog.text
    place.folder.remove("a")
    assert sorted(path.name for path in place.folder.path.iterdir()) == [
        *("b.num_train", "b.pub", "c.num_train", "c.pub", "d.pub")
    ]


@pytest.mark.parametrize("text", ["0", "-3", "1e3", "٣", "9" * 17, "", "12 13"])
def test_invalid_number_of_examples_is_a_problem(place: Place, text: str) -> None:
    place.folder.add("a", public_key())
    (place.folder.path / "a.num_train").write_text(text)
    counts, problems = place.folder.counts()
    assert (counts, len(problems)) == ({}, 1)


def test_no_number_is_fixed_that_no_client_has(place: Place) -> None:
    with pytest.raises(CredentialError, match=f"found {2**53 + 1}"):
        place.folder.add("a", public_key(), 2**53 + 1)
    assert place.names() == []


def test_a_removed_key_does_not_come_back(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    key = public_key()
    place.folder.add("site-a", key)
    place.names()
    place.folder.remove("site-a")
    place.names()
    place.folder.add("site-a", key)
    assert place.names() == []
    assert "make it another one" in caplog.text


def test_a_name_may_get_another_key(place: Place) -> None:
    for _ in range(2):
        place.folder.add("site-a", public_key())
        assert place.names() == ["site-a"]
        place.folder.remove("site-a")
    assert len(place.flower.known) == 2


def test_nodes_registered_with_flowers_command_are_removed(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.folder.add("site-a", public_key())
    for name in ("by-hand", "", "site-a"):
        place.flower.register(name, public_key())
    assert place.names() == ["site-a"]
    assert caplog.text.count("its key is not in the folder") == 3
    assert [node.status for node in place.flower.known] == [
        *[UNREGISTERED] * 3,
        "registered",
    ]


def test_without_a_folder_no_client_is_removed(place: Place) -> None:
    place.folder.add("site-a", public_key())
    place.names()
    place.folder.path.rename(place.folder.path.with_name("unmounted"))
    with pytest.raises(RunError, match="registrations stay as they are"):
        place.names()
    assert [node.status for node in place.flower.known] == ["registered"]


def test_unreadable_keys_are_named_and_left_out(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.folder.add("site-a", public_key())
    copy = place.folder.path / "site-z.pub"
    copy.write_bytes((place.folder.path / "site-a.pub").read_bytes())
    (place.folder.path / "broken.pub").write_text("no key")
    (place.folder.path / "bad name.pub").write_text("no key")
    with caplog.at_level(logging.WARNING):
        assert place.names() == ["site-a"]
    for warning in (
        "broken.pub",
        "'bad name' cannot be",
        "the key of site-z is already",
    ):
        assert warning in caplog.text


def test_a_name_is_one_key(place: Place) -> None:
    key = public_key()
    place.folder.add("site-a", key)
    with pytest.raises(CredentialError, match="the name site-a is taken"):
        place.folder.add("site-a", public_key())
    with pytest.raises(CredentialError, match="is already that of site-a"):
        place.folder.add("site-b", key)
    with pytest.raises(CredentialError, match="cannot be a client's name"):
        place.folder.add("../site-b", public_key())


def test_without_a_roster_a_removed_client_stays_away(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    removed, kept = public_key(), public_key()
    place.folder.add("site-a", removed)
    place.folder.add("site-b", kept)
    place.names()
    place.roster.write_text("damaged")
    place.folder.remove("site-a")
    with pytest.raises(RunError, match="damaged"):
        place.names()
    place.roster.unlink()
    assert place.names() == ["site-b"]
    assert "removed site-a" in caplog.text
    assert [node.status for node in place.flower.known] == [UNREGISTERED, "registered"]
    assert place.names() == ["site-b"]
    place.folder.add("site-a", removed)
    assert place.names() == ["site-b"]


def test_without_authentication_all_nodes_are_clients(place: Place) -> None:
    node_id = place.flower.register("any name", public_key())
    roster = reconcile(place.folder, place.flower, place.roster, insecure=True)
    assert [client.name for client in roster.values()] == [f"node-{node_id}"]


@pytest.mark.parametrize("name", ["../site-a", "/tmp/site-a", "..", "", "a/b", "a\n"])
def test_names_do_not_lead_out_of_the_folder(place: Place, name: str) -> None:
    outside = place.folder.path.parent / "site-a.pub"
    outside.write_text("key")
    with pytest.raises(CredentialError, match="cannot be a client's name"):
        place.folder.remove(name)
    with pytest.raises(CredentialError, match="cannot be a client's name"):
        FederationFolder(place.folder.path).client(name)
    assert outside.exists()


def test_a_damaged_roster(place: Place) -> None:
    place.roster.write_text('{"format": 2}')
    with pytest.raises(RunError, match="remove it"):
        place.names()
