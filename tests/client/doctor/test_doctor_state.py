import os
from dataclasses import replace
from pathlib import Path

import pytest

from knnper.client.doctor import State
from knnper.client.flower_node import Activation, holder, locked
from knnper.client.install import SiteState
from knnper.client.limits import note_refusal
from knnper.client.state import read_serving
from knnper.files import write_atomically
from knnper.strategies.core.exported_model import save_model
from knnper.transport.credentials import fingerprint, new_node_key, write_node_key
from knnper.transport.diagnosis import Check, Finding, Verdict, examine
from tests.client.doctor.scripted_server import client
from tests.client.state.small_site import NAME, site, small_model

MODEL = small_model()


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(client(tmp_path))


@pytest.fixture
def site_state(tmp_path: Path) -> SiteState:
    """Return the site_state of a client that serves a model."""
    site_state = SiteState(tmp_path / "state", NAME)
    site_state.install(MODEL, site(), took_part=True)
    return site_state


def kept(site_state: SiteState) -> list[Finding]:
    found = State(client(site_state.places.folder.parent))
    checks = [Check("model", found.models), Check("memory", found.store, ("model",))]
    return [one.finding for one in examine(checks)]


def test_a_folder_that_is_nobodys_yet(state: State) -> None:
    for check in (state.is_own, state.node, state.last_refusal):
        assert check().verdict is Verdict.OK
    assert not state.places.folder.exists()


def test_the_folder_of_another_client(state: State, tmp_path: Path) -> None:
    SiteState(state.places.folder, "site-b")
    finding = state.is_own()
    assert finding.verdict is Verdict.PROBLEM
    assert "is the state of the client 'site-b'" in finding.found
    assert finding.mend == "give every client a `state` folder of its own"


def test_the_folder_of_another_key(state: State, tmp_path: Path) -> None:
    key = tmp_path / "site-a.key"
    write_node_key(key, new_node_key())
    SiteState(state.places.folder, NAME, fingerprint(new_node_key().public_key()))
    finding = State(replace(state.settings, key=key)).is_own()
    assert finding.verdict is Verdict.PROBLEM
    assert "bring the key back" in finding.mend


def test_a_running_node_is_seen_and_not_disturbed(state: State) -> None:
    folder = state.places.folder
    assert holder(folder) is None
    with locked(folder):
        assert holder(folder) == os.getpid()
        assert state.node() == Finding(Verdict.OK, f"runs (process {os.getpid()})")
    assert holder(folder) is None
    with locked(folder):
        pass


def test_a_node_that_crashed(state: State) -> None:
    with locked(state.places.folder) as lock:
        Activation.of(state.places.folder, lock).note(7)
    finding = state.node()
    assert finding.verdict is Verdict.WARNING
    assert "did not leave in order" in finding.found


def test_the_servers_refusal_is_told(state: State) -> None:
    state.places.folder.mkdir()
    note_refusal(state.places.folder, "client", "its key is registered as site-b")
    finding = state.last_refusal()
    assert finding.verdict is Verdict.WARNING
    assert finding.found.endswith(
        "the server refused this client: its key is registered as site-b"
    )


def test_a_model_with_another_fingerprint_was_distributed(state: State) -> None:
    state.places.folder.mkdir()
    reason = "the model that the server distributed: expected the model 12, found 34"
    note_refusal(state.places.folder, "model", reason)
    finding = state.last_refusal()
    assert finding.verdict is Verdict.PROBLEM
    assert reason in finding.found
    assert "the same versions on both sides" in finding.mend


def test_a_refusal_from_before_the_model_is_past(site_state: SiteState) -> None:
    serving = read_serving(site_state.places.serving)
    assert serving is not None
    line = '{"time": "2001-01-01T00:00:00+00:00", "about": "model", "reason": "x"}\n'
    (site_state.places.folder / "refusals.jsonl").write_text(line)
    found = State(client(site_state.places.folder.parent)).last_refusal()
    assert found.verdict is Verdict.OK


def test_nothing_is_installed(state: State) -> None:
    assert state.models().verdict is Verdict.SKIPPED


def test_a_model_and_a_memory_as_they_should_be(site_state: SiteState) -> None:
    model, memory = kept(site_state)
    assert (model.verdict, memory.verdict) == (Verdict.OK, Verdict.OK)
    assert MODEL.fingerprint[:12] in model.found
    assert memory.found.startswith("50 examples, embedded by")


def test_the_served_model_is_missing(site_state: SiteState) -> None:
    folder = site_state.places.model(MODEL.fingerprint)
    folder.rename(folder.with_name("elsewhere"))
    model, memory = kept(site_state)
    assert model.verdict is Verdict.PROBLEM
    assert "which is not in" in model.found
    assert "knnper site onboard --model FOLDER" in model.mend
    assert memory.verdict is Verdict.SKIPPED


def test_a_model_with_another_fingerprint(site_state: SiteState) -> None:
    folder, other = site_state.places.model(MODEL.fingerprint), small_model(seed=1)
    folder.rename(site_state.places.folder / "gone")
    save_model(folder, other)
    model, _ = kept(site_state)
    assert model.verdict is Verdict.PROBLEM
    assert f"expected the model {MODEL.fingerprint[:12]}" in model.found
    assert f"found {other.fingerprint[:12]}" in model.found


def test_damaged_weights(site_state: SiteState) -> None:
    path = site_state.places.model(MODEL.fingerprint) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    model, _ = kept(site_state)
    assert model.verdict is Verdict.PROBLEM
    assert "it was damaged or replaced" in model.found


def test_a_memory_of_another_model(site_state: SiteState) -> None:
    serving = read_serving(site_state.places.serving)
    assert serving is not None
    other = small_model(seed=1)
    save_model(site_state.places.model(other.fingerprint), other)
    text = site_state.places.serving.read_text()
    changed = text.replace(MODEL.fingerprint, other.fingerprint)
    write_atomically(site_state.places.serving, changed)
    model, memory = kept(site_state)
    assert model.verdict is Verdict.OK
    assert memory.verdict is Verdict.PROBLEM
    assert memory.expected == f"the model that is served, {other.fingerprint[:12]}"
    assert memory.mend == "start knnper site serve, which embeds them anew"


def test_a_memory_that_is_gone(site_state: SiteState) -> None:
    site_state.places.store.rename(site_state.places.folder / "gone")
    _, memory = kept(site_state)
    assert memory.verdict is Verdict.WARNING


def test_a_folder_that_others_can_look_into(state: State) -> None:
    assert state.is_private().verdict is Verdict.OK
    state.places.folder.mkdir(mode=0o700)
    assert state.is_private().verdict is Verdict.OK
    state.places.folder.chmod(0o750)
    finding = state.is_private()
    assert finding.verdict is Verdict.WARNING
    assert finding.mend == f"chmod 700 {state.places.folder}"
