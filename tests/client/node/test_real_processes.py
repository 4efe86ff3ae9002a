"""A real server and client: whose code is run."""

from pathlib import Path

import pytest

from knnper.server.link.superlink import CONNECTION
from tests.processes import BIN, KNNPER
from tests.server.link.running_server import running_server

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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], "[0, 1, 2, 3]"), (["--allow-app-code"], "the code of the run")],
)
def test_the_code_of_a_run_is_run_only_when_allowed(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    app, output = tmp_path / "app", tmp_path / "output"
    app.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "trial_server.py").write_text(SERVER)
    (app / "trial_client.py").write_text(CODE_OF_THE_RUN)
    with running_server(tmp_path / "fed", ("site-a",)) as server:
        config = server.folder.client("site-a") / "client.yaml"
        command = [KNNPER, "fed", "client", config, "--app", "misbehaving_app:app"]
        modules = {"PYTHONPATH": str(Path(__file__).parent)}
        client = server.commands.start("client", [*command, *arguments], modules)
        client.wait_for("in the federation of")
        told = ("--stream", "--run-config", f'output="{output}"')
        home = {"FLWR_HOME": str(server.settings.flower_home)}
        words = [BIN / "flwr", "run", app, CONNECTION, *told]
        run = server.commands.start("run", words, home)
        assert run.wait() == 0, run.written
    assert output.read_text() == expected
