"""What a client has of its own: data, limits, service, and its state folder."""

import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from PIL import Image

from knnper.client.doctor import client_checks
from knnper.client.flower_node import Activation, holder, locked
from knnper.client.install import SiteState
from knnper.client.limits import Answer, Answers, note_refusal
from knnper.client.runtime import Personalized
from knnper.client.settings import read_client
from knnper.client.site import installer_of
from knnper.experiment import load_experiment
from knnper.files import write_atomically
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.catalogue import assemble
from knnper.strategies.core.exported_model import ModelError, save_model
from knnper.strategies.core.records import ModelPayload
from knnper.transport.credentials import fingerprint, new_node_key, write_node_key
from knnper.transport.diagnosis import Finding, Verdict, examine
from tests.client.doctor.scripted_server import Script, answering, client, look, told
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


def test_data_as_it_should_be(file: Path) -> None:
    for label in ("cat", "dog"):
        folder = file.parent / "data" / label
        folder.mkdir(parents=True)
        for number in range(10):
            pixels = np.full((4, 4), 20 * number + (label == "dog"), np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    told(look(file, "data"), OK, "examples of 2 classes")


@pytest.mark.parametrize("exists", [False, True])
def test_no_data(file: Path, exists: bool) -> None:
    if exists:
        (file.parent / "data").mkdir()
    found = "no examples" if exists else "there is no such folder"
    told(look(file, "data"), PROBLEM, found, f"knnper site check {file}")


def test_who_has_the_services_port(file: Path, free_port: str) -> None:
    told(look(file, "service", free_port), OK, "is free")
    with answering(Script(answers={"/ready": (503, "{}")}), None) as address:
        told(look(file, "service", port(address)), OK, f"runs at {address}")
    with answering(Script(), None) as address:
        finding = look(file, "service", port(address))
    told(finding, PROBLEM, f"other software has {address}", "set `service.port`")


def test_a_token_that_others_can_read(file: Path, folder: Path, free_port: str) -> None:
    token = folder / "token"
    folder.mkdir()
    token.write_text("secret")
    token.chmod(0o640)
    told(look(file, "service", "service.port=0"), OK)  # the port is not asked for
    told(look(file, "service", free_port), PROBLEM, mend=f"chmod 600 {token}")


def test_limits_and_what_is_left_of_them(file: Path) -> None:
    finding = look(file, "limits", "limits.models=[mlp]")
    for words in ("at least 32 examples", "any method", "mlp model", "0 of 1000"):
        told(finding, OK, words)
    now = datetime.now(UTC)
    Answers(read_client(file)).note(Answer(now, 1, "e", "training"))
    finding = look(file, "limits", "limits.training_rounds=1")
    told(finding, WARNING, "1 of 1 in 30 days", "limits.training_rounds")
    quiet = look(file, "limits", "share_metrics=false", "train=false")
    for words in ("no metrics", "no training"):
        told(quiet, OK, words)


def kept(file: Path) -> list[Finding]:
    """Return what is found of the model, and of the memory if that makes sense."""
    found = {one.subject: one for one in client_checks(read_client(file))}
    checks = [found[one] for one in ("folder", "model", "memory")]
    return [one.finding for one in examine(checks)][1:]


def test_a_folder_that_is_nobodys_yet(file: Path, folder: Path) -> None:
    for subject in ("owner", "node", "refusals", "privacy"):
        told(look(file, subject), OK)
    told(look(file, "model"), SKIPPED)
    assert not folder.exists()


def test_the_folder_of_another_client_or_key(file: Path, folder: Path) -> None:
    def owner(file: Path) -> Finding:
        checks = client_checks(read_client(file))
        return examine([one for one in checks if one.subject == "owner"])[0].finding

    SiteState(folder, "site-b")
    mend = "give every client a `state` folder of its own"
    told(owner(file), PROBLEM, "is the state of the client 'site-b'", mend)
    (folder / "identity.json").unlink()
    write_node_key(folder.parent / "site-a.key", new_node_key())
    SiteState(folder, NAME, fingerprint(new_node_key().public_key()))
    told(owner(client(folder.parent, tls=True)), PROBLEM, mend="bring the key back")


def test_a_running_node_is_seen_and_not_disturbed(file: Path, folder: Path) -> None:
    with locked(folder):
        told(look(file, "node"), OK, f"runs (process {os.getpid()})")
    assert holder(folder) is None
    with locked(folder) as lock:
        Activation.of(folder, lock).note(7)
    told(look(file, "node"), WARNING, "did not leave in order")


def test_refusals_are_told(file: Path, folder: Path) -> None:
    for about, reason, verdict, mend in (
        ("client", "its key is registered as site-b", WARNING, "remove"),
        ("run", "the model mlp", WARNING, "client.yaml"),
        ("model", "expected the model 12, found 34", PROBLEM, "the same versions"),
    ):
        note_refusal(folder, about, reason)  # type: ignore[arg-type]
        told(look(file, "refusals"), verdict, reason, mend)


def test_a_refusal_from_before_the_model_is_past(
    file: Path, site_state: SiteState
) -> None:
    line = '{"time": "2001-01-01T00:00:00+00:00", "about": "model", "reason": "x"}\n'
    (site_state.places.folder / "refusals.jsonl").write_text(line)
    told(look(file, "refusals"), OK)


def test_a_model_and_a_memory_as_they_should_be(
    file: Path, site_state: SiteState
) -> None:
    model, memory = kept(file)
    told(model, OK, MODEL.fingerprint[:12])
    told(memory, OK, "50 examples, embedded by")
    site_state.places.store.rename(site_state.places.folder / "gone")
    told(kept(file)[1], WARNING)


def test_the_served_model_is_missing_damaged_or_another(
    file: Path, site_state: SiteState
) -> None:
    folder, other = site_state.places.model(MODEL.fingerprint), small_model(seed=1)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    told(kept(file)[0], PROBLEM, "it was damaged or replaced")
    folder.rename(site_state.places.folder / "elsewhere")
    model, memory = kept(file)
    told(model, PROBLEM, "not in", "knnper site onboard --model FOLDER")
    told(memory, SKIPPED)
    save_model(folder, other)
    found = f"found {other.fingerprint[:12]}"
    for words in (f"expected the model {MODEL.fingerprint[:12]}", found):
        told(kept(file)[0], PROBLEM, words)


def test_a_memory_of_another_model(file: Path, site_state: SiteState) -> None:
    other = small_model(seed=1)
    save_model(site_state.places.model(other.fingerprint), other)
    text = site_state.places.serving.read_text()
    changed = text.replace(MODEL.fingerprint, other.fingerprint)
    write_atomically(site_state.places.serving, changed)
    model, memory = kept(file)
    told(model, OK)
    told(memory, PROBLEM, mend="start knnper site serve")
    assert other.fingerprint[:12] in memory.expected


def test_a_folder_that_others_can_look_into(file: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    told(look(file, "privacy"), OK)
    folder.chmod(0o750)
    told(look(file, "privacy"), WARNING, mend=f"chmod 700 {folder}")


def test_a_model_that_the_server_did_not_announce_is_refused_and_told(
    file: Path,
) -> None:
    experiment = load_experiment(small_experiment(), experiment_catalogue())
    assembly = assemble(experiment, SPEC)
    handed = ModelPayload(assembly.task.initial_weights)
    settings, data = read_client(file), small_site.site()
    keep = installer_of(settings, assembly, data, expected="0" * 64)
    with pytest.raises(ModelError, match="expected the model 000000000000"):
        keep(cast(Personalized, SimpleNamespace(reference=handed)))
    told(look(file, "refusals"), PROBLEM, "expected the model", "the same versions")
    told(look(file, "model"), SKIPPED)  # nothing of it is installed
