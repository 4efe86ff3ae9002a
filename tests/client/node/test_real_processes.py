"""A real server and client: whose code is run, and who is let in."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from knnper.server.link.superlink import CONNECTION
from tests.processes import BIN, KNNPER, Running
from tests.server.link.running_server import RunningServer, running_server

pytestmark = pytest.mark.slow

PROJECT = """
[project]
name = "trial"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "knnper"
[tool.flwr.app.components]
serverapp = "trial_server:app"
clientapp = "trial_client:app"
[tool.flwr.app.config]
output = ""
"""


CODE_OF_THE_RUN = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()

@app.train()
def train(message, context):
    content = RecordDict({"answer": ConfigRecord({"is": "the code of the run"})})
    return Message(content, reply_to=message)
"""

IN = "in the federation of"
SERVER = """
import time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    content = RecordDict({"do": ConfigRecord({"what": "compute"})})
    (reply,) = grid.send_and_receive([Message(content, nodes[0], "train")])
    Path(context.run_config["output"]).write_text(reply.content["answer"]["is"])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("real"), ("site-a",)) as opened:
        yield opened


def started(server: RunningServer, config: Path, *arguments: str) -> Running:
    command: list[str | Path] = [KNNPER, "fed", "client", config, *arguments]
    command += ["--app", "misbehaving_app:app"]
    modules = {"PYTHONPATH": str(Path(__file__).parent)}
    return server.commands.start("client", command, modules)


def output_of_run(server: RunningServer, folder: Path, server_code: str) -> str:
    """Run an app with its own server and client code; return what its server writes."""
    app, output = folder / "app", folder / "output"
    app.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "trial_server.py").write_text(server_code)
    (app / "trial_client.py").write_text(CODE_OF_THE_RUN)
    options = ("--stream", "--run-config", f'output="{output}"')
    words: list[str | Path] = [BIN / "flwr", "run", app, CONNECTION, *options]
    home = {"FLWR_HOME": str(server.settings.flower_home)}
    run = server.commands.start("run", words, home)
    assert run.wait() == 0, run.written
    return output.read_text()


@pytest.mark.parametrize(
    ("arguments", "ready", "expected"),
    [
        ([], IN, "[0, 1, 2, 3]"),
        (["--allow-app-code"], "Starting Flower SuperNode", "the code of the run"),
    ],
)
def test_the_code_of_a_run_is_run_only_when_allowed(
    server: RunningServer,
    tmp_path: Path,
    arguments: list[str],
    ready: str,
    expected: str,
) -> None:
    config = server.folder.client("site-a") / "client.yaml"
    client = started(server, config, *arguments)
    client.wait_for(ready)
    output = output_of_run(server, tmp_path, SERVER)
    assert client.stop() == 0
    assert output == expected


IDLE_S = 6.0  # as long as the gateway then holds the node's request
AFTER_IDLING = """
import time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from knnper.transport.polling import announce, push
app = ServerApp()

@app.main()
def main(grid, context):
    announce()
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    for _ in range(3):
        time.sleep(6.0)
        content = RecordDict({"do": ConfigRecord({"what": "when"})})
        sent, ids = time.time(), push(grid, [Message(content, nodes[0], "train")])
        while not (replies := list(grid.pull_messages(ids))):
            time.sleep(0.1)
        begun = float(replies[0].content["answer"]["is"])
        with open(context.run_config["output"], "a") as output:
            print(begun - sent, file=output)
"""


def test_a_node_that_was_idle_begins_within_a_second(
    server: RunningServer, tmp_path: Path
) -> None:
    client = started(server, server.folder.client("site-a") / "client.yaml")
    client.wait_for(IN)
    output = output_of_run(server, tmp_path, AFTER_IDLING)
    assert client.stop() == 0
    seconds = [float(line) for line in output.split()]
    assert len(seconds) == 3
    assert min(seconds) < 1
    assert max(seconds) < IDLE_S


def test_a_second_node_of_a_key_is_refused(
    server: RunningServer, tmp_path: Path
) -> None:
    config, copy = server.folder.client("site-a") / "client.yaml", tmp_path / "copy"
    first = started(server, config)
    first.wait_for(IN)
    shutil.copytree(config.parent, copy, ignore=shutil.ignore_patterns("state"))
    second = started(server, copy / "client.yaml", "--patience", "0")
    assert second.wait() == 1
    assert "a node with this key is online" in second.written
    assert first.stop() == 0
