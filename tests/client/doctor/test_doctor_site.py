"""What a client has of its own: data, limits, service, and its state folder."""

import os
import socket
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from PIL import Image

from knnper.client.doctor import Site, State, client_checks
from knnper.client.flower_node import Activation, holder, locked
from knnper.client.install import SiteState
from knnper.client.limits import Answer, Answers, note_refusal
from knnper.client.runtime import Personalized
from knnper.client.settings import read_client
from knnper.client.site import installer_of
from knnper.files import write_atomically
from knnper.loading import load_experiment
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.catalogue import assemble
from knnper.strategies.core.exported_model import ModelError, save_model
from knnper.strategies.core.records import ModelPayload
from knnper.transport.credentials import fingerprint, new_node_key, write_node_key
from knnper.transport.diagnosis import Check, Finding, Verdict, examine
from tests.client.doctor.scripted_server import Script, answering, client, told
from tests.client.state.small_site import NAME, SPEC, small_experiment, small_model
from tests.client.state.small_site import site as small_site

MODEL = small_model()
OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return client(tmp_path).file


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(client(tmp_path))


@pytest.fixture
def site_state(tmp_path: Path) -> SiteState:
    """Return the state of a client that serves a model."""
    site_state = SiteState(tmp_path / "state", NAME)
    site_state.install(MODEL, small_site(), took_part=True)
    return site_state


def site(config: Path, *changes: str) -> Site:
    return Site(read_client(config, changes))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def test_data_as_it_should_be(config: Path) -> None:
    for label in ("cat", "dog"):
        folder = config.parent / "data" / label
        folder.mkdir(parents=True)
        for number in range(10):
            pixels = np.full((4, 4), 20 * number + (label == "dog"), np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    told(site(config).data(), OK, "examples of 2 classes")


@pytest.mark.parametrize("folder", [False, True])
def test_no_data(config: Path, folder: bool) -> None:
    if folder:
        (config.parent / "data").mkdir()
    found = "no examples" if folder else "there is no such folder"
    told(site(config).data(), PROBLEM, found, f"knnper site check {config}")


def test_who_has_the_services_port(config: Path) -> None:
    told(site(config, f"service.port={free_port()}").service(), OK, "is free")
    with answering(Script(answers={"/ready": (503, "{}")}), None) as address:
        finding = site(config, f"service.port={address.rpartition(':')[2]}").service()
    assert finding.found == f"runs at {address}"
    with answering(Script(), None) as address:
        finding = site(config, f"service.port={address.rpartition(':')[2]}").service()
    told(finding, PROBLEM, f"other software has {address}", "set `service.port`")


def test_a_token_that_others_can_read(config: Path) -> None:
    token = config.parent / "state" / "token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o640)
    told(site(config, "service.port=0").service(), OK)  # the port is not asked for
    finding = site(config, f"service.port={free_port()}").service()
    told(finding, PROBLEM, mend=f"chmod 600 {token}")


def test_limits_and_what_is_left_of_them(config: Path) -> None:
    finding = site(config, "limits.models=[mlp]").limits()
    for words in ("at least 32 examples", "any method", "mlp model", "0 of 1000"):
        told(finding, OK, words)
    now = datetime.now(UTC)
    Answers(read_client(config)).note(Answer(now, 1, "e", "training"))
    finding = site(config, "limits.training_rounds=1").limits()
    told(finding, WARNING, "1 of 1 in 30 days", "limits.training_rounds")
    quiet = site(config, "share_metrics=false", "train=false").limits()
    assert "no metrics" in quiet.found
    assert "no training" in quiet.found


def kept(site_state: SiteState) -> list[Finding]:
    found = State(client(site_state.places.folder.parent))
    checks = [Check("model", found.models), Check("memory", found.store, ("model",))]
    return [one.finding for one in examine(checks)]


def test_a_folder_that_is_nobodys_yet(state: State) -> None:
    for check in (state.is_own, state.node, state.last_refusal):
        told(check(), OK)
    assert state.models().verdict is Verdict.SKIPPED
    assert not state.places.folder.exists()


def test_the_folder_of_another_client_or_key(state: State, tmp_path: Path) -> None:
    folder = state.places.folder
    SiteState(folder, "site-b")
    mend = "give every client a `state` folder of its own"
    told(state.is_own(), PROBLEM, "is the state of the client 'site-b'", mend)
    (folder / "identity.json").unlink()
    key = tmp_path / "site-a.key"
    write_node_key(key, new_node_key())
    SiteState(folder, NAME, fingerprint(new_node_key().public_key()))
    finding = State(replace(state.settings, key=key)).is_own()
    told(finding, PROBLEM, mend="bring the key back")


def test_a_running_node_is_seen_and_not_disturbed(state: State) -> None:
    folder = state.places.folder
    with locked(folder):
        assert state.node() == Finding(OK, f"runs (process {os.getpid()})")
    assert holder(folder) is None
    with locked(folder) as lock:
        Activation.of(folder, lock).note(7)
    told(state.node(), WARNING, "did not leave in order")


def test_refusals_are_told(state: State) -> None:
    folder = state.places.folder
    folder.mkdir()
    note_refusal(folder, "client", "its key is registered as site-b")
    told(state.last_refusal(), WARNING, "this client: its key is registered as site-b")
    note_refusal(folder, "model", "expected the model 12, found 34")
    finding = state.last_refusal()
    told(finding, PROBLEM, "expected the model 12, found 34", "the same versions")


def test_a_refusal_from_before_the_model_is_past(site_state: SiteState) -> None:
    line = '{"time": "2001-01-01T00:00:00+00:00", "about": "model", "reason": "x"}\n'
    (site_state.places.folder / "refusals.jsonl").write_text(line)
    told(State(client(site_state.places.folder.parent)).last_refusal(), OK)


def test_a_model_and_a_memory_as_they_should_be(site_state: SiteState) -> None:
    model, memory = kept(site_state)
    told(model, OK, MODEL.fingerprint[:12])
    told(memory, OK, "50 examples, embedded by")
    site_state.places.store.rename(site_state.places.folder / "gone")
    told(kept(site_state)[1], WARNING)


def test_the_served_model_is_missing_or_another(site_state: SiteState) -> None:
    folder, other = site_state.places.model(MODEL.fingerprint), small_model(seed=1)
    folder.rename(site_state.places.folder / "elsewhere")
    model, memory = kept(site_state)
    told(model, PROBLEM, "which is not in", "knnper site onboard --model FOLDER")
    assert memory.verdict is Verdict.SKIPPED
    save_model(folder, other)
    model, _ = kept(site_state)
    told(model, PROBLEM, f"expected the model {MODEL.fingerprint[:12]}")
    told(model, PROBLEM, f"found {other.fingerprint[:12]}")


def test_damaged_weights(site_state: SiteState) -> None:
    path = site_state.places.model(MODEL.fingerprint) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    told(kept(site_state)[0], PROBLEM, "it was damaged or replaced")


def test_a_memory_of_another_model(site_state: SiteState) -> None:
    other = small_model(seed=1)
    save_model(site_state.places.model(other.fingerprint), other)
    text = site_state.places.serving.read_text()
    changed = text.replace(MODEL.fingerprint, other.fingerprint)
    write_atomically(site_state.places.serving, changed)
    model, memory = kept(site_state)
    told(model, OK)
    told(memory, PROBLEM, mend="start knnper site serve")
    assert other.fingerprint[:12] in memory.expected


def test_a_folder_that_others_can_look_into(state: State) -> None:
    told(state.is_private(), OK)
    state.places.folder.mkdir(mode=0o700)
    told(state.is_private(), OK)
    state.places.folder.chmod(0o750)
    told(state.is_private(), WARNING, mend=f"chmod 700 {state.places.folder}")


def test_a_model_that_the_server_did_not_announce_is_refused_and_told(
    state: State,
) -> None:
    state.places.folder.mkdir()
    experiment = load_experiment(small_experiment(), experiment_catalogue())
    assembly = assemble(experiment, SPEC)
    handed = ModelPayload(assembly.task.initial_weights)
    keep = installer_of(state.settings, assembly, small_site(), expected="0" * 64)
    with pytest.raises(ModelError, match="expected the model 000000000000"):
        keep(cast(Personalized, SimpleNamespace(reference=handed)))
    found = {one.subject: one.look for one in client_checks(state.settings)}
    told(found["refusals"](), PROBLEM, "expected the model", "the same versions")
    assert found["model"]().verdict is Verdict.SKIPPED, "nothing of it is installed"
