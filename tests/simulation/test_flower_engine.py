"""The adapter to Flower's engine; its agreement with others is `test_parity`'s."""

import socket
import subprocess
from pathlib import Path

import pytest
import ray
from flwr.clientapp import ClientApp

from knnper.errors import RunError
from knnper.experiment import RunSettings
from knnper.simulation.flower_engine import (
    SESSION_FILE,
    carrier_of,
    requests_at_once,
    require_cluster,
    require_same_folder,
    run_nodes,
)
from knnper.transport import messages as shared_memory
from knnper.transport.messages import (
    IN_MESSAGE,
    Carrier,
    Files,
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
        (RunSettings(ray_address="10.0.0.1:6379"), Carrier),
        (RunSettings(ray_address="auto", carrier="message"), Carrier),
        (RunSettings(ray_address="auto", carrier="shared_memory"), Files),
    ],
)
def test_files_in_memory_stay_on_one_machine(
    run: RunSettings, kind: type[Carrier]
) -> None:
    with carrier_of(run) as carrier:
        assert type(carrier) is kind


def test_without_room_models_go_in_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "LEAST_FREE_BYTES", 2**62)
    with carrier_of(RunSettings()) as carrier:
        assert carrier is IN_MESSAGE
    with (
        pytest.raises(RunError, match="--shm-size"),
        carrier_of(RunSettings(carrier="shared_memory")),
    ):
        pass


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
    told = r"did not start in time.*too busy.*--engine serial.*Ray says: The current"
    with pytest.raises(RunError, match=told):
        run_nodes(ClientApp(), 1, RunSettings(), lambda grid, stop: stop.wait(60))
    assert "Traceback" not in capfd.readouterr().err
