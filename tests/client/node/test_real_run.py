import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.node.real_processes import (
    BIN,
    Link,
    client,
    environment,
    link_running,
    new_client,
)

pytestmark = pytest.mark.slow
SERVER = """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    heard = []
    for what in ("compute", "kill", "compute"):
        content = RecordDict({"do": ConfigRecord({"what": what})})
        began = time.monotonic()
        sent = list(grid.push_messages([Message(content, nodes[0], "train")]))
        while not (replies := list(grid.pull_messages(sent))):
            time.sleep(0.02)
        (reply,) = replies
        seconds = time.monotonic() - began
        if reply.has_error():
            heard.append([reply.error.reason, seconds])
        else:
            heard.append([reply.content["answer"]["is"], seconds])
    Path(context.run_config["output"]).write_text(json.dumps(heard))
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
FOUND = "[0, 1, 2, 3]"
KILLED = (
    "the client's process died: it was ended by SIGKILL, perhaps for lack of memory"
)


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    with link_running(tmp_path_factory.mktemp("link")) as one:
        yield one


@pytest.fixture
def config(link: Link, tmp_path: Path) -> Path:
    path = new_client(tmp_path / "site-a", link)
    link.register(path.with_name("client.key"), tmp_path.name)
    return path


def _run(link: Link, folder: Path, code: str) -> list[tuple[str, float]]:
    heard = link.run(folder / "app", trial_server=SERVER, trial_client=code)
    return [(said, seconds) for said, seconds in heard]


def test_the_code_of_a_run_is_not_run_and_a_death_costs_no_minute(
    link: Link, config: Path, tmp_path: Path
) -> None:
    with client(config) as process:
        process.wait_until_in()
        heard = _run(link, tmp_path, CODE_OF_THE_RUN)
    assert [said for said, _ in heard] == [FOUND, KILLED, FOUND]
    assert max(seconds for _, seconds in heard) < 20


def test_the_code_of_a_run_is_run_only_when_allowed(
    link: Link, config: Path, tmp_path: Path
) -> None:
    with client(config, "--allow-app-code") as process:
        process.wait_until_in()
        heard = _run(link, tmp_path, CODE_OF_THE_RUN)
    assert {said for said, _ in heard} == {"the code of the run"}


def test_flowers_own_supernode_plays_the_same_messages(
    link: Link, config: Path, tmp_path: Path
) -> None:
    with _flower_supernode(link, config):
        heard = _run(link, tmp_path, "from misbehaving_app import app\napp = app\n")
    assert [heard[0][0], heard[2][0]] == [FOUND, FOUND]
    assert heard[1][0] == "ClientApp stopped responding."


@contextlib.contextmanager
def _flower_supernode(link: Link, config: Path) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command: list[str | Path] = [BIN / "flower-supernode", "--port", port]
    command += ["--superlink", link.address, "--root-certificates", link.ca]
    command += ["--auth-supernode-private-key", config.with_name("client.key")]
    home = config.parent / "flwr"
    process = subprocess.Popen(
        command,
        env=environment(home),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()
