"""``knnper serve`` as it is typed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from client.residence.residence import Residence
from knnper.cli.app import app
from knnper.data.examples import Examples
from knnper.data.site.agreement import SiteTask
from knnper.data.site.site_data import NamedExamples, SiteData
from tests.client.service.small_service import (
    CLASSES,
    IMAGE,
    some_inputs,
    some_labels,
    tiny_model,
)

FILE = """
name: site-a
server: localhost:8443
insecure: true
data: {name: image_folder, path: data}
service: {port: 0}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "client.yaml"
    path.write_text(FILE)
    return path


def test_no_token_is_refused_where_others_can_ask(config: Path) -> None:
    command = ["serve", "--config", str(config), "--no-token"]
    result = CliRunner().invoke(app, [*command, "--set", "service.host=0.0.0.0"])
    assert result.exit_code == 1
    assert "expected a loopback one" in result.output
    assert "Warning: 0.0.0.0 is open to other machines, without TLS" in result.output


@pytest.mark.slow
def test_a_client_serves_what_is_installed_until_it_is_told_to_stop(
    config: Path,
) -> None:
    examples = NamedExamples(Examples(some_inputs(6), some_labels(6)), tuple("abcdef"))
    nothing = NamedExamples(Examples(some_inputs(0), some_labels(0)), ())
    data = SiteData(examples, nothing, nothing, SiteTask(IMAGE, CLASSES, ()))
    state = config.parent / "state"
    Residence(state, "site-a").install(tiny_model(), data, took_part=False)
    with subprocess.Popen(
        [Path(sys.executable).with_name("knnper"), "serve", "--config", config],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            address = next(line for line in lines if "serves at" in line).split()[-1]
            assert any("serving the model" in line for line in lines)
            token = (state / "token").read_text().strip()
            answer = httpx.post(
                f"{address}/predict",
                json={"inputs": some_inputs(1).tolist()},
                headers={"Authorization": f"Bearer {token}"},
            )
        finally:
            process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(20) == 0
    assert answer.json()["num_stored"] == 6
