"""The adapter to Flower's engine; its agreement with others is `test_parity`'s."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

from knnper.errors import CodecError, RunError
from knnper.experiment import RunSettings
from knnper.simulation.flower_engine import (
    SESSION_FILE,
    carrier_of,
    require_same_folder,
)
from knnper.simulation.flower_nodes import (
    requests_at_once,
    require_cluster,
    run_nodes,
    short_ray_folder,
)
from knnper.simulation.object_store import ObjectStore
from knnper.strategies.core.records import ModelPayload
from knnper.transport import shared_memory
from knnper.transport.messages import (
    IN_MESSAGE,
    VECTOR,
    Carrier,
    Files,
    Packed,
    pack,
    unpack,
)
from knnper.transport.polling import MESSAGES_AT_ONCE
from tests.processes import KNNPER

EXPERIMENT = """
name: engine
data: {name: digits}
partition: {name: iid, num_clients: 3}
model: {name: tiny_cnn}
training: {num_rounds: 1}
method: {name: fedavg}
"""


def test_ray_gets_a_short_folder_where_its_own_is_too_long_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    assert short_ray_folder() is None
    # 107 bytes, less those of /ray/session_.../sockets/plasma_store.
    longest = "/" + 38 * "x"
    socket_path = "/ray/session_2026-11-27_05-11-44_987705_4194304/sockets/plasma_store"
    assert len(longest + socket_path) == 107
    monkeypatch.setenv("TMPDIR", longest)
    assert short_ray_folder() is None
    monkeypatch.setenv("TMPDIR", longest + "x")
    assert short_ray_folder(tmp_path) == tmp_path / "ray"
    assert "TMPDIR = /xx" in caplog.text
    monkeypatch.setenv("RAY_TMPDIR", "/short")
    assert short_ray_folder(tmp_path) is None
    monkeypatch.delenv("RAY_TMPDIR")
    with pytest.raises(RunError, match=r"40 bytes, expected at most 39.* RAY_TMPDIR"):
        short_ray_folder(tmp_path / "missing")


@pytest.mark.slow
@pytest.mark.ray
def test_simulation_runs_with_a_long_folder_for_temporary_files(tmp_path: Path) -> None:
    path, folder = tmp_path / "experiment.yaml", tmp_path / (100 * "t")
    path.write_text(EXPERIMENT)
    folder.mkdir()
    done = subprocess.run(
        [KNNPER, "simulate", path, "--output", tmp_path / "run"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    assert "RAY_TMPDIR" in done.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_a_machine_that_is_too_small_is_an_error_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(EXPERIMENT)
    folder, asks = tmp_path / "run", "run.gpus_per_client=100"
    done = subprocess.run(
        [KNNPER, "simulate", path, "--set", asks, "--output", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "run.gpus_per_client" in done.stderr
    assert "Error: Flower's simulation failed" in done.stderr


# Which way models travel.


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MEMORY_FILE_SYSTEM", tmp_path)


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (RunSettings(), Files),
        (RunSettings(carrier="shared_memory"), Files),
        (RunSettings(carrier="message"), Carrier),
        (RunSettings(carrier="object_store"), ObjectStore),
        (RunSettings(ray_address="10.0.0.1:6379"), ObjectStore),
        (RunSettings(ray_address="auto", carrier="message"), Carrier),
        (RunSettings(ray_address="auto", carrier="shared_memory"), Files),
    ],
)
def test_files_in_memory_stay_on_one_machine(
    run: RunSettings, kind: type[Carrier]
) -> None:
    with carrier_of(run) as carrier:
        assert type(carrier) is kind


def test_without_room_models_go_by_the_object_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "LEAST_FREE_BYTES", 2**62)
    with carrier_of(RunSettings()) as carrier:
        assert type(carrier) is ObjectStore
    with (
        pytest.raises(RunError, match="--shm-size"),
        carrier_of(RunSettings(carrier="shared_memory")),
    ):
        pass
    # It rests on what Flower does not promise.
    monkeypatch.setenv("KNNPER_PLAIN_FLOWER", "1")
    with carrier_of(RunSettings()) as carrier:
        assert carrier is IN_MESSAGE


# In a process of its own: Ray leaves files open and threads running in it.
IN_THE_STORE = """
import gc
import json
import time

import ray
import torch
from flwr.app import RecordDict

from knnper.records import fingerprint
from knnper.simulation.object_store import ObjectStore
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.transport.messages import pack, packed_of, to_content, unpack, unpack_shared

NUM_ROUNDS, NUM_CLIENTS = 6, 4
STORE_BYTES = 80_000_000  # less than all rounds put
WEIGHTS = torch.linspace(-1, 1, 1_000_000)


@ray.remote
class Worker:
    def answer(self, content: RecordDict) -> tuple[int, RecordDict]:
        carrier, request = ObjectStore(shares=False), packed_of(content, "payload")
        payload = unpack_shared(ModelPayload, request, carrier)
        number = torch.clone(payload.weights)
        reply = pack(ModelUpdate(number, 1, 0.5), carrier)
        number.zero_()  # what is done after the reply does not show in it
        return id(payload), to_content(None, {"reply": reply})


def known() -> int:
    gc.collect()
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def left(before: int) -> int:
    for _ in range(1000):  # a worker's last word on what it read may come later
        if known() <= before:
            return 0
        time.sleep(0.02)
    return known() - before


ray.init(num_cpus=1, include_dashboard=False, logging_level=40, log_to_driver=False,
         object_store_memory=STORE_BYTES)
worker, carrier = Worker.remote(), ObjectStore(shares=True)
ray.get(worker.__ray_ready__.remote())
gc.freeze()  # what is imported is not looked through each time
before = known()
found = {"same": [], "payloads": [], "left": [], "bytes": []}
for number in range(NUM_ROUNDS):
    payload = ModelPayload(WEIGHTS + number)
    request = to_content(None, {"payload": pack(payload, carrier)})
    given = [worker.answer.remote(request) for _ in range(NUM_CLIENTS)]
    ray.wait(given, num_returns=NUM_CLIENTS)
    if number == NUM_ROUNDS - 1:
        ray.kill(worker)  # its replies are there nevertheless
    answers = ray.get(given)
    found["payloads"].append(len({place for place, _ in answers}))
    for _, content in answers:
        reply = packed_of(content, "reply")
        for one in (request["payload.array"], reply.array):
            found["bytes"].append(len(one["vector"].data))
        update = unpack(ModelUpdate, reply, carrier, WEIGHTS.nbytes)
        found["same"].append(torch.equal(update.weights, payload.weights))
    del answers, content, given, reply, request
    found["left"].append(left(before))
print(json.dumps(found))
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.ray
def test_the_object_store_holds_no_more_than_a_round(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_STORE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes["same"]) == 24
    assert all(sizes["same"])
    assert sizes["payloads"] == [1] * 6, "a worker reads what is shared once"
    assert not any(sizes["bytes"]), "a message holds no numbers itself"
    assert sizes["left"] == [0] * 6, "what was used is forgotten"


def test_a_reply_may_not_be_larger_than_others() -> None:
    carrier = ObjectStore(shares=False)
    packed = pack(ModelPayload(torch.ones(10)), carrier)
    assert unpack(ModelPayload, packed, carrier, 40).weights.tolist() == [1.0] * 10
    with pytest.raises(CodecError, match="expected at most 39 bytes, found 40"):
        unpack(ModelPayload, packed, carrier, 39)
    # Numbers that Flower did not hand on are missed.
    lost = Packed(ArrayRecord({VECTOR: packed.array[VECTOR]}), packed.entry)
    with pytest.raises(CodecError, match="expected a float32 vector"):
        unpack(ModelPayload, lost, carrier)


# What a worker checks before it runs clients.


def test_a_folder_of_another_disk(tmp_path: Path) -> None:
    for written in (None, "another run"):
        if written is not None:
            (tmp_path / SESSION_FILE).write_text(written)
        with pytest.raises(RunError, match="give --output on a file system that all"):
            require_same_folder(tmp_path, "abc")
    (tmp_path / SESSION_FILE).write_text("abc")
    require_same_folder(tmp_path, "abc")


# What is checked before Flower starts.


def test_the_address_of_a_cluster(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        server.listen()
        for host in ("127.0.0.1", "[127.0.0.1]"):
            require_cluster(f"{host}:{port}")
    with pytest.raises(RunError, match=f"found nothing at 127.0.0.1:{port}"):
        require_cluster(f"127.0.0.1:{port}")
    for impossible in ("127.0.0.1:99999", "no-such-host.invalid:6379"):
        with pytest.raises(RunError, match=r"correct run\.ray_address"):
            require_cluster(impossible)
    # What Ray resolves itself is left to Ray.
    for address in (None, "auto", "ray://127.0.0.1:1", "local"):
        require_cluster(address)


def test_requests_for_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requests_at_once(RunSettings(num_workers=2)) == MESSAGES_AT_ONCE
    assert requests_at_once(RunSettings(num_workers=100)) == 400
    # A cluster is sent as many as its machines have room for.
    nodes = [{"Resources": {"CPU": cores}} for cores in (64.0, 7.0)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    run = RunSettings(ray_address="auto", cpus_per_client=2.0)
    assert requests_at_once(run) == 4 * (32 + 3)


def test_why_ray_did_not_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def init(**arguments: object) -> None:
        raise Exception("The current node timed out during startup. Who knows why.")

    monkeypatch.setattr(ray, "init", init)
    message = r"did not start in time.*--engine serial.*Ray's error: The current"
    with pytest.raises(RunError, match=message):
        run_nodes(ClientApp(), 1, RunSettings(), lambda grid, stop: stop.wait(60))
    assert "Traceback" not in capfd.readouterr().err
