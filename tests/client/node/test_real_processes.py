"""A real SuperLink with real clients: what is refused, run, killed and asked."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.client.flower_node import CLIENT_APP
from knnper.client.limits import REFUSALS
from knnper.experiment import to_json
from knnper.transport.credentials import (
    issue_server_certificate,
    new_authority,
    new_node_key,
    write_node_key,
)
from tests.apps.site_grid import experiment, make_sites
from tests.client.site.hostile_server import CLIENT, one_by_one
from tests.processes import (
    BIN,
    BIN_IN_PATH,
    KNNPER,
    LOCALHOST,
    Commands,
    Running,
    free_port,
    wait_until,
)

PROJECT = """
[project]
name = "trial"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "knnper"
[tool.flwr.app.components]
serverapp = "trial_server:app"
clientapp = "trial_client:app"
[tool.flwr.app.config]
output = ""
experiment = ""
"""


@dataclass(frozen=True)
class Link:
    """A SuperLink with TLS that takes only registered keys."""

    address: str
    ca: Path
    commands: Commands

    def register(self, key: Path, name: str) -> None:
        words = ("supernode", "register", f"{key}.pub", "link", "--name", name)
        self.commands.run("register", BIN / "flwr", *words)

    def run(self, app: Path, config: str = "", **modules: str) -> Any:
        """Run modules as an app; return what its server half wrote to ``output``."""
        app.mkdir()
        (app / "pyproject.toml").write_text(PROJECT)
        for name, code in modules.items():
            (app / f"{name}.py").write_text(code)
        config = f'output="{app / "output.json"}" {config}'
        words = ("run", app, "link", "--stream", "--run-config", config)
        self.commands.run("run", BIN / "flwr", *words)
        return json.loads((app / "output.json").read_text())

    @contextlib.contextmanager
    def client(self, config: Path, *arguments: str) -> Iterator[Running]:
        command: list[str | Path] = [KNNPER, "fed", "client", config]
        command += ["--app", "misbehaving_app:app", *arguments]
        process = self.commands.start("client", command)
        try:
            yield process
        finally:
            process.stop()  # so that the server counts it out at once


@contextlib.contextmanager
def link_running(folder: Path) -> Iterator[Link]:
    authority, ca = new_authority("a CA"), folder / "ca.crt"
    certificate, key = folder / "server.crt", folder / "server.key"
    authority.write(ca, folder / "ca.key")
    issue_server_certificate(authority, [LOCALHOST]).write(certificate, key)
    port, home = free_port(), folder / "operator"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.link]\naddress = "{LOCALHOST}:{port}"\n'
        f"root-certificates = {json.dumps(str(ca))}\n"
    )
    command: list[str | Path] = [BIN / "flower-superlink", "--port", str(port)]
    command += ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate]
    command += ["--ssl-keyfile", key, "--enable-supernode-auth"]
    command += ["--disable-runtime-dependency-installation"]
    modules = str(Path(__file__).parent)
    environment = {"FLWR_HOME": str(home), "PATH": BIN_IN_PATH, "PYTHONPATH": modules}
    with Commands(folder / "logs", environment) as commands:
        process = commands.start("link", command)

        def is_reached() -> bool:
            assert not process.ended, process.written
            with contextlib.suppress(OSError):
                socket.create_connection((LOCALHOST, port)).close()
                return True
            return False

        wait_until(is_reached, "a SuperLink", 60)
        yield Link(f"{LOCALHOST}:{port}", ca, commands)


def new_client(folder: Path, link: Link, key: Path | None = None) -> Path:
    """Return the file of a client whose key nobody knows yet, or of ``key``."""
    folder.mkdir()
    if key is None:
        key = folder / "client.key"
        write_node_key(key, new_node_key())
    path = folder / "client.yaml"
    path.write_text(
        f"name: {folder.name}\nserver: {link.address}\n"
        f"tls: {{ca: {link.ca}}}\nkey: {key}\n"
        "data: {name: image_folder, path: data}\n"
    )
    return path


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc").exists(), reason="looks at processes in /proc"
    ),
]


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    with link_running(tmp_path_factory.mktemp("link")) as one:
        yield one


@pytest.fixture
def config(link: Link, tmp_path: Path) -> Path:
    path = new_client(tmp_path / "site-a", link)
    link.register(path.with_name("client.key"), f"site-{time.time_ns()}")
    return path


IN = "in the federation of"


def test_life_of_a_client(link: Link, config: Path, tmp_path: Path) -> None:
    with link.client(config) as first:
        first.wait_for(IN)
        with link.client(config) as second:
            assert second.wait() == 1
            holder = f"in use by another `knnper fed client` (process {first.pid})"
            assert holder in second.written
        elsewhere = new_client(
            tmp_path / "site-b", link, config.with_name("client.key")
        )
        with link.client(elsewhere, "--patience", "0") as third:
            assert third.wait() == 1
            assert "a node with this key is online" in third.written
        runner = _runner_of(first)
        first.kill()
        _wait_until_gone(runner)
    with link.client(config) as again:
        again.wait_for("did not leave in order the last time")
        again.wait_for(IN)
        runner = _runner_of(again)
        began = time.monotonic()
        assert again.stop() == 0
        assert time.monotonic() - began < 5  # alone on a machine: less than 1
        _wait_until_gone(runner)
    with link.client(config, "--patience", "0") as after_an_orderly_end:
        after_an_orderly_end.wait_for(IN)


def _runner_of(client: Running) -> int:
    """Return the process id of a client's runner."""
    children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text()
    (runner,) = map(int, children.split())
    return runner


def _wait_until_gone(process: int) -> None:
    wait_until(lambda: not Path(f"/proc/{process}").exists(), "its end", 5)


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


def _run(link: Link, folder: Path, code: str) -> list[tuple[str, float]]:
    heard = link.run(folder / "app", trial_server=SERVER, trial_client=code)
    return [(said, seconds) for said, seconds in heard]


def test_the_code_of_a_run_is_not_run_and_a_death_costs_no_minute(
    link: Link, config: Path, tmp_path: Path
) -> None:
    with link.client(config) as process:
        process.wait_for(IN)
        heard = _run(link, tmp_path, CODE_OF_THE_RUN)
    assert [said for said, _ in heard] == [FOUND, KILLED, FOUND]
    assert max(seconds for _, seconds in heard) < 20


def test_the_code_of_a_run_is_run_only_when_allowed(
    link: Link, config: Path, tmp_path: Path
) -> None:
    with link.client(config, "--allow-app-code") as process:
        process.wait_for(IN)
        heard = _run(link, tmp_path, CODE_OF_THE_RUN)
    assert {said for said, _ in heard} == {"the code of the run"}


def test_flowers_own_supernode_plays_the_same_messages(
    link: Link, config: Path, tmp_path: Path
) -> None:
    command: list[str | Path] = [BIN / "flower-supernode", "--port", str(free_port())]
    command += ["--superlink", link.address, "--root-certificates", link.ca]
    command += ["--auth-supernode-private-key", config.with_name("client.key")]
    home = {"FLWR_HOME": str(config.parent / "flwr")}
    supernode = link.commands.start("supernode", command, home)
    heard = _run(link, tmp_path, "from misbehaving_app import app\napp = app\n")
    supernode.stop()
    assert [heard[0][0], heard[2][0]] == [FOUND, FOUND]
    assert heard[1][0] == "ClientApp stopped responding."


# Softmax regression with a batch of one and one step: every update is one image.
HOSTILE = f"""
import json, time
from pathlib import Path
from flwr.app import Message
from flwr.serverapp import ServerApp
from knnper.experiment import from_json
from knnper.transport.messages import (Job, pack, packed_of, to_content, unpack)
from knnper.strategies.catalogue import assemble, site_catalogue
from knnper.strategies.core.records import ModelPayload, ModelUpdate
app = ServerApp()

def images_of(sent, trained, spec):
    gradient = (sent - trained).double()
    of_bias = gradient[-spec.num_classes:]
    largest = of_bias.abs().argmax()
    row = gradient[:-spec.num_classes].reshape(spec.num_classes, -1)[largest]
    pixels = row / of_bias[largest] * spec.std[0] + spec.mean[0]
    return (255 * pixels).round().clamp(0, 255).int().tolist()

@app.main()
def main(grid, context):
    text = Path(context.run_config["experiment"]).read_text()
    experiment = from_json(text, site_catalogue())
    spec = experiment.data.settings.task().spec
    weights = assemble(experiment, spec).task.initial_weights
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    heard = []
    for number in range(1, 6):
        job = Job(["{CLIENT}"], number, [0], text, state_rounds=[0])
        content = to_content(job, {{"payload": pack(ModelPayload(weights), None)}})
        sent = list(grid.push_messages([Message(content, nodes[0], "train")]))
        while not (replies := list(grid.pull_messages(sent))):
            time.sleep(0.05)
        (reply,) = replies
        if reply.has_error():
            heard.append(reply.error.reason)
            continue
        update = unpack(ModelUpdate, packed_of(reply.content, "reply"))
        heard.append(images_of(weights, update.weights, spec))
    Path(context.run_config["output"]).write_text(json.dumps(heard))
"""


def test_it_gets_images_only_where_the_site_allows_it(
    tmp_path: Path, link: Link
) -> None:
    make_sites(tmp_path, experiment())
    shares = tmp_path / "shares"
    images = np.load(shares / f"{CLIENT}.npz")["train_inputs"].reshape(-1, 64).tolist()
    guarded, config = _attacked(tmp_path / "guarded", link, shares, "")
    assert len(guarded) == 5
    assert all("limits.min_examples" in str(one) for one in guarded)
    noted = (config.parent / "state" / REFUSALS).read_text().splitlines()
    assert len(noted) == 1, "once, however often it is asked"
    opened, _ = _attacked(
        tmp_path / "opened", link, shares, "limits: {min_examples: 1}\n"
    )
    assert all(one in images for one in opened), "the attack is a real one"


def _attacked(
    folder: Path, link: Link, shares: Path, limits: str
) -> tuple[list[object], Path]:
    """Return what the hostile server hears of a site, and the site's file."""
    config = new_client(folder, link)
    text = config.read_text().replace(f"name: {folder.name}", f"name: '{CLIENT}'")
    data = f"data: {{name: npz, path: {shares / CLIENT}.npz}}\n"
    config.write_text(text[: text.index("data:")] + data + limits)
    link.register(config.with_name("client.key"), folder.name)
    asked = folder / "asked.json"
    asked.write_text(to_json(one_by_one()))
    with link.client(config, "--app", CLIENT_APP) as process:
        process.wait_for(IN)
        heard: list[object] = link.run(
            folder / "app",
            f'experiment="{asked}"',
            trial_server=HOSTILE,
            trial_client="from trial_server import app\napp = app\n",
        )
    return heard, config
