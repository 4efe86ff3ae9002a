import socket
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from knnper.client.doctor import Site
from knnper.client.limits import Answer, Answers
from knnper.client.settings import read_client
from knnper.transport.diagnosis import Verdict
from tests.client.doctor.scripted_server import Script, answering, client


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return client(tmp_path).file


def put_images(config: Path, count: int) -> None:
    for label in ("cat", "dog"):
        folder = config.parent / "data" / label
        folder.mkdir(parents=True)
        for number in range(count):
            value = 20 * number + (label == "dog")
            pixels = np.full((4, 4), value, np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")


def site(config: Path, *changes: str) -> Site:
    return Site(read_client(config, changes))


def test_data_as_it_should_be(config: Path) -> None:
    put_images(config, 10)
    finding = site(config).data()
    assert finding.verdict is Verdict.OK, finding
    assert finding.found.endswith("examples of 2 classes")


@pytest.mark.parametrize("folder", [False, True])
def test_no_data(config: Path, folder: bool) -> None:
    if folder:
        (config.parent / "data").mkdir()
    finding = site(config).data()
    assert finding.verdict is Verdict.PROBLEM
    assert "there is no such folder" in finding.found or "no examples" in finding.found
    assert f"knnper site check {config}" in finding.mend


def test_a_free_port(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    finding = site(config, f"service.port={port}").service()
    assert finding.verdict is Verdict.OK
    assert "is free" in finding.found
    assert site(config, "service.port=0").service().verdict is Verdict.OK


def test_the_service_itself(config: Path) -> None:
    with answering(Script(answers={"/ready": (503, "{}")}), None) as address:
        port = address.rpartition(":")[2]
        finding = site(config, f"service.port={port}").service()
    assert finding.found == f"runs at {address}"


def test_other_software_has_the_port(config: Path) -> None:
    with answering(Script(), None) as address:
        port = address.rpartition(":")[2]
        finding = site(config, f"service.port={port}").service()
    assert finding.verdict is Verdict.PROBLEM
    assert finding.found == f"other software has {address}"
    assert "set `service.port`" in finding.mend


def test_a_token_that_others_can_read(config: Path) -> None:
    token = config.parent / "state" / "token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o640)
    finding = site(config, "service.port=0").service()
    assert finding.verdict is Verdict.OK  # the port is not asked for
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    finding = site(config, f"service.port={port}").service()
    assert finding.verdict is Verdict.PROBLEM
    assert finding.mend == f"run: chmod 600 {token}"


def test_limits_and_what_is_left_of_them(config: Path) -> None:
    finding = site(config, "limits.models=[mlp]").limits()
    assert finding.verdict is Verdict.OK
    for words in ("at least 32 examples", "any method", "mlp model", "0 of 1000"):
        assert words in finding.found
    now = datetime.now(UTC)
    Answers(read_client(config)).note(Answer(now, 1, "e", "training"))
    finding = site(config, "limits.training_rounds=1").limits()
    assert finding.verdict is Verdict.WARNING
    assert "1 of 1 in 30 days" in finding.found
    assert "limits.training_rounds" in (finding.mend or "")
    quiet = site(config, "share_metrics=false", "train=false").limits()
    assert "no metrics" in quiet.found
    assert "no training" in quiet.found
