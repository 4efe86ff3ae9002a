"""Clients that misbehave, and clients that are not let in."""

import re
import shutil
from collections.abc import Callable

import numpy as np
import pytest

from knnper.server.link.setup import FederationFolder
from knnper.transport.credentials import (
    issue_server_certificate,
    new_authority,
    new_node_key,
    read_identity,
    write_certificate,
    write_node_key,
)
from tests.federation.site_tricks import (
    BOAST,
    BOASTED,
    DISTRIBUTING,
    HANG,
    INFINITE,
    KEEP_MODELS,
    NAN,
    NORM,
    NOTHING,
    RUDE,
    SCALED,
    SHAPE,
    TAMPER,
    training,
)
from tests.federation.small_federation import SEEN, Federation, Found
from tests.processes import Running, wait_until

pytestmark = pytest.mark.slow

# The client with most examples, whose update is looked at first.
BAD = "0003"
ROUND_TIMEOUT_S = 25

WRONG = {
    NAN: "weights is not finite",
    INFINITE: "weights is not finite",
    SHAPE: "expected tensors of shapes",
    NORM: "the update moved by a norm of .*, more than .*run.max_update_norm_ratio",
    SCALED: "weights moved by a norm of .* run.max_update_median_ratio",
    RUDE: r"x\\n2026-01-01 ERROR server: all is lost\\x1b\[2J\[red\]<script>y",
    NOTHING: "expected a number of training examples, at least 1, found 0",
    HANG: f"its deadline passed|no answer within {ROUND_TIMEOUT_S} s",
}

SLOW_DATA = f"""
import time
from pathlib import Path

import numpy as np


def share(base, task):
    calls = Path(base) / "calls"
    with calls.open("a") as file:
        file.write("x")
    if len(calls.read_text()) == 2:  # the first one is for the introduction
        time.sleep({10 * ROUND_TIMEOUT_S})
    return dict(np.load(Path(base) / "data.npz"))
"""


def test_updates_that_cannot_be_used_are_left_out(found: Found) -> None:
    federation = found()
    plan = {training(number): deed for number, deed in enumerate(WRONG, 1)}
    federation.tricks(BAD).plan(plan)
    server = federation.server()
    federation.clients()
    num_rounds = len(WRONG) + 1
    submitted, run = federation.submit(
        f"training.num_rounds={num_rounds}",
        f"run.federation.round_timeout_s={ROUND_TIMEOUT_S}",
    )
    assert submitted.wait() == 0
    assert [one["num_failed"] for one in run.rounds] == [*[1] * len(WRONG), 0]
    assert [one["num_clients"] for one in run.rounds] == [*[2] * len(WRONG), 3]
    for number, reason in enumerate(WRONG.values(), 1):
        words = rf"round {number}: client {BAD} failed: .*({reason})"
        for told in (federation.run_log, server.written, submitted.written):
            assert re.search(words, told, re.MULTILINE), words
            assert "\x1b[2J" not in told
        assert re.search(reason, run.rounds[number - 1]["failures"][BAD])
    assert set(run.clients) == set(SEEN), "it gets the model all the same"


def test_no_client_takes_the_mean_by_what_it_says_of_itself(found: Found) -> None:
    federation = found()
    boasts = dict.fromkeys(("introduction", training(1), training(2)), BOAST)
    for name in SEEN:
        planned = boasts if name == BAD else {}
        federation.tricks(name).plan({"models": KEEP_MODELS, **planned})
    server = federation.server()
    federation.clients()
    sizes = {name: federation.num_train(name) for name in SEEN}
    others = sum(sizes.values()) - sizes[BAD]
    submitted, _ = federation.submit("training.num_rounds=2")
    assert submitted.wait() == 0
    # As much as all others together, and no more.
    assert mean_of_round_1(federation, {**sizes, BAD: others})
    assert f"client {BAD} says that it trains on {BOASTED} examples" in server.written
    # What the operator fixes counts from the next run on.
    fixed = federation.server_file.parent / "authorized" / f"{BAD}.num_train"
    fixed.write_text("77\n")
    roster = federation.server_file.parent / "state" / "roster.json"
    wait_until(lambda: '"num_train": 77' in roster.read_text(), "the number is known")
    shutil.rmtree(federation.folder / "run")
    submitted, _ = federation.submit("training.num_rounds=2")
    assert submitted.wait() == 0
    assert mean_of_round_1(federation, {**sizes, BAD: 77})


def mean_of_round_1(federation: Federation, weights: dict[str, int]) -> bool:
    """Return whether what was sent in round 2 is the mean with these weights."""
    mean = sum(
        count * model(federation, name, "trained-1").astype(np.float64)
        for name, count in weights.items()
    ) / sum(weights.values())
    return np.allclose(model(federation, BAD, "sent-2"), mean, rtol=1e-5, atol=1e-7)


def model(federation: Federation, name: str, which: str) -> np.ndarray:
    found: np.ndarray = np.load(federation.client_folder(name) / f"{which}.npy")
    return found


def test_a_silent_client_holds_a_round_as_long_as_the_others_take(found: Found) -> None:
    """Not for the hour that the operator would wait at most."""
    federation = found()
    federation.tricks(BAD).plan({training(2): HANG})
    federation.server()
    federation.clients()
    submitted, run = federation.submit(
        "training.num_rounds=3", "run.federation.round_patience=1"
    )
    assert submitted.wait() == 0
    assert [one["num_failed"] for one in run.rounds] == [0, 1, 0]
    assert 30 < run.rounds[1]["seconds"] < 600


def test_data_that_never_come_block_nobody(found: Found) -> None:
    federation = found()
    (federation.client_folder(BAD) / "slow_data.py").write_text(SLOW_DATA)
    federation.configure(BAD, data={"name": "python", "entry": "slow_data:share"})
    federation.server()
    nodes = federation.clients()
    submitted, run = federation.submit(
        "training.num_rounds=2", f"run.federation.round_timeout_s={ROUND_TIMEOUT_S}"
    )
    assert submitted.wait() == 0
    assert [one["num_failed"] for one in run.rounds] == [1, 0]
    assert set(run.clients) == set(SEEN)
    assert "reading the data was not done within" in nodes[BAD].written


HONEST, TAMPERED, IMPOSTOR = SEEN
REFUSED = 1
OF_ANOTHER = f"the key is registered as {HONEST}, and `name` is {IMPOSTOR}"


def test_each_side_says_why_a_client_is_not_let_in(found: Found) -> None:
    federation = found()
    server = federation.server()
    for change, to_client, in_doctor, to_server in (
        (_without_tls, "it probably expects TLS; remove `insec", "TLS", "no TLS"),
        (
            _with_other_authority,
            "is not of the CA that signed it",
            "ca.crt",
            "s ca.crt",
        ),
        (_with_unknown_key, "not registered there", "not registered", "not registered"),
    ):
        _require_refused(federation, change, to_client, in_doctor)
        server.wait_for(to_server, 10)
    federation.clients(HONEST)
    _require_refused(
        federation, _with_key_of_another, "a node with this key is online", OF_ANOTHER
    )
    server.wait_for(f"{HONEST} is connected already", 10)
    _let_certificate_expire(federation)
    server.wait_for("the gateway uses the new certificate", 30)
    _require_refused(federation, _unchanged, "certificate has expired", "expired")
    server.wait_for("knnper fed renew", 10)


def test_a_taken_name_and_a_model_that_was_changed(found: Found) -> None:
    federation = found()
    federation.configure(IMPOSTOR, name=HONEST)
    federation.tricks(TAMPERED).plan({DISTRIBUTING: TAMPER})
    federation.server()
    nodes = federation.clients()
    submitted, run = federation.submit("run.federation.min_clients=2")
    assert submitted.wait() == 0
    objection = f"its key is registered as {IMPOSTOR}, and it calls itself {HONEST}"
    assert f"is refused: {objection}" in federation.run_log
    nodes[IMPOSTOR].wait_for(f"the server refuses this client: .*{objection}", 30)
    noted = federation.client_folder(IMPOSTOR) / "state/refusals.jsonl"
    assert objection in noted.read_text()
    assert set(run.clients) == {HONEST}
    assert run.results["model_distribution"]["offline"] == [TAMPERED]
    wrong = "the model that the server distributed: expected the model"
    assert f"client {TAMPERED} could not personalise: {wrong}" in (federation.run_log)
    assert wrong in nodes[TAMPERED].written
    assert not (federation.client_folder(TAMPERED) / "state/serving.json").exists()


def _require_refused(
    federation: Federation,
    change: Callable[[Federation], None],
    words: str,
    in_doctor: str,
) -> None:
    """A client that is changed so ends at once and says why; so does the doctor."""
    folder = federation.client_folder(IMPOSTOR)
    before = folder.with_name("before")
    shutil.copytree(folder, before)
    change(federation)
    node: Running = federation.client(IMPOSTOR, "--patience", "0")
    assert node.wait() == REFUSED
    assert words in " ".join(node.written.split())
    assert "Traceback" not in node.written
    doctor = federation.start(
        IMPOSTOR, "doctor", "site", "doctor", federation.client_file(IMPOSTOR)
    )
    assert doctor.wait() == REFUSED
    assert in_doctor in " ".join(doctor.written.split())
    shutil.rmtree(folder)
    before.rename(folder)


def _unchanged(federation: Federation) -> None:
    pass


def _without_tls(federation: Federation) -> None:
    federation.configure(IMPOSTOR, tls=None, key=None, insecure=True)


def _with_other_authority(federation: Federation) -> None:
    ca = federation.client_folder(IMPOSTOR) / "ca.crt"
    ca.unlink()
    write_certificate(ca, new_authority("another").certificate)


def _with_unknown_key(federation: Federation) -> None:
    key = federation.client_folder(IMPOSTOR) / "stranger.key"
    write_node_key(key, new_node_key())
    federation.configure(IMPOSTOR, key=key.name)


def _with_key_of_another(federation: Federation) -> None:
    key = federation.client_folder(HONEST) / f"{HONEST}.key"
    federation.configure(IMPOSTOR, key=str(key))


def _let_certificate_expire(federation: Federation) -> None:
    place = FederationFolder(federation.folder)
    authority = read_identity(place.authority / "ca.crt", place.authority / "ca.key")
    expired = issue_server_certificate(authority, ["127.0.0.1"], days=-1)
    files = place.server / "server.crt", place.server / "server.key"
    for file in files:
        file.unlink()
    expired.write(*files)
