"""``knnper site doctor`` and ``knnper fed doctor`` as a user types them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from knnper.cli.federation import federation
from knnper.cli.site import site
from knnper.files import FileLock
from knnper.server.link.setup import (
    LOCK,
    FederationFolder,
    add_client,
    create_federation,
)
from knnper.server.settings import read_server
from knnper.transport.credentials import Address
from tests.client.doctor.scripted_server import Script, answering
from tests.processes import free_port

ACTIVATE = "/v1/fleet/activate-node"
REGISTERED = (400, '{"code": 2003, "detail": "", "standing": %s}')


@pytest.fixture
def place(tmp_path: Path) -> FederationFolder:
    """Return a federation with the client site-a, whose service takes any port."""
    place = FederationFolder(tmp_path / "fed")
    create_federation(place, ["127.0.0.1"], free_port(), free_port())
    client = add_client(place, "site-a", Address("127.0.0.1", 1))
    inputs = np.arange(20 * 4, dtype=np.uint8).reshape(20, 2, 2)
    split = ["train"] * 14 + ["validation"] * 3 + ["test"] * 3
    labels = ["cat", "dog"] * 10
    np.savez(client / "own.npz", inputs=inputs, labels=labels, split=split)
    return place


def client_of(place: FederationFolder, **changes: object) -> Path:
    path = place.client("site-a") / "client.yaml"
    document = yaml.safe_load(path.read_text())
    document |= {"service": {"port": 0}, "data": {"name": "npz", "path": "own.npz"}}
    path.write_text(yaml.safe_dump({**document, **changes}))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(site, ["doctor", *map(str, arguments)])


def run_on_server(*arguments: object) -> Result:
    return CliRunner().invoke(federation, ["doctor", *map(str, arguments)])


def test_all_is_well(place: FederationFolder) -> None:
    files = place.server / "server.crt", place.server / "server.key"
    known = (REGISTERED[0], REGISTERED[1] % '{"name": "site-a", "idle_s": null}')
    script = Script(answers={"/health": (200, ""), ACTIVATE: known})
    with answering(script, files) as server:
        config = client_of(place, server=server)
        result = run(config)
        as_json = run(config, "--json")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"client site-a ({config})"
    assert "  ✓ registration   registered as site-a" in lines
    assert "Nothing is wrong." in lines
    document = json.loads(as_json.stdout)
    assert (document["kind"], document["well"]) == ("client", True)
    verdicts = {check["subject"]: check["verdict"] for check in document["checks"]}
    assert verdicts["certificate"] == "ok"
    assert verdicts["model"] == "skipped"


def test_problems_come_last_with_what_to_do(place: FederationFolder) -> None:
    result = run(client_of(place, server=f"127.0.0.1:{free_port()}"))
    assert result.exit_code == 1
    *_, mark, mend, summary = (line for line in result.stdout.splitlines() if line)
    assert mark.startswith("  ✗ server         nothing listens at 127.0.0.1:")
    assert mend.startswith("                   fix: start the server there")
    assert summary.startswith("The server cannot be reached: nothing listens at 127.")
    assert summary.endswith(". 1 problem: server.")
    assert "  - tls            applies once this passes: server" in result.stdout


def test_a_client_that_is_not_let_in(place: FederationFolder) -> None:
    files = place.server / "server.crt", place.server / "server.key"
    unknown = (400, '{"code": 2004, "detail": ""}')
    script = Script(answers={"/health": (200, ""), ACTIVATE: unknown})
    with answering(script, files) as server:
        result = run(client_of(place, server=server), "--json")
    assert result.exit_code == 1
    verdict = json.loads(result.stdout)["verdict"]
    assert verdict.startswith("The server is there, and this client cannot join it: ")


def test_a_server_that_is_down(place: FederationFolder) -> None:
    for path in (place.path, place.server, place.server_file):
        down = run_on_server(path)
        assert down.exit_code == 1
        *_, mark, fix, summary = down.stdout.splitlines()
        assert mark == "  ✗ server         does not run"
        assert fix.endswith("fix: start it: knnper fed server FEDERATION")
        assert summary == (
            "The server is down: no client can connect, and no run can begin. "
            "1 problem: server."
        )
    document = json.loads(run_on_server(place.path, "--json").stdout)
    assert (document["kind"], document["well"]) == ("server", False)


def test_a_server_that_runs(place: FederationFolder) -> None:
    settings = read_server(place.server_file)
    settings.state.mkdir()
    with FileLock(settings.state / LOCK):
        result = run_on_server(place.path)
    # The lock alone is no server: its ports do not answer.
    assert result.exit_code == 1
    assert "The server runs, with faults. " in result.stdout


def test_a_wrong_file(place: FederationFolder) -> None:
    wrong = client_of(place, sevrer="x")
    result = run(wrong)
    assert result.exit_code == 2
    assert "sevrer" in result.stderr
    assert result.stdout == ""
    assert run(wrong.with_name("no.yaml")).exit_code == 2
    assert run().exit_code == 2
    assert run_on_server(wrong.with_name("no.yaml")).exit_code == 2


def test_a_server_needs_no_torch(place: FederationFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from knnper.cli.federation import doctor"
        f"\ntry: doctor(Path({str(place.server_file)!r}))\n"
        "except Exception: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
