"""``knnper site serve`` as it is typed."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from knnper_cli.app import app
from tests.client.service.serve_process import serve_process
from tests.client.service.small_service import some_inputs

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
    command = ["site", "serve", str(config), "--no-token"]
    result = CliRunner().invoke(app, [*command, "--set", "service.host=0.0.0.0"])
    assert result.exit_code == 1
    assert "expected a loopback one" in result.output
    assert "Warning: 0.0.0.0 is open to other machines, without TLS" in result.output


@pytest.mark.slow
def test_a_client_serves_what_is_installed_until_it_is_told_to_stop(
    tmp_path: Path,
) -> None:
    with serve_process(tmp_path) as client:
        answer = client.post("/predict", json={"inputs": some_inputs(1).tolist()})
    assert answer.json()["num_stored"] == 6
