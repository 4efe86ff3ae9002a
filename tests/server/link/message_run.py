"""A run that sends small messages to nodes and writes down who answered what."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnper.server.link.submission import status
from knnper.server.link.superlink import CONNECTION
from tests.processes import wait_until
from tests.server.link.running_server import RunningServer

_PROJECT = """\
[project]
name = "messages"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "knnper"
[tool.flwr.app.components]
serverapp = "told:server_app"
clientapp = "told:server_app"
[tool.flwr.app.config]
nodes = ""
rounds = 1
seconds = 60
size = 10
output = ""
"""
_CODE = """
import json, time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

server_app = ServerApp()

@server_app.main()
def main(grid, context):
    given = context.run_config
    nodes = [int(one) for one in given["nodes"].split()]
    with open(given["output"], "a") as output:
        for number in range(given["rounds"]):
            payload = np.full(given["size"], number, np.float32)
            content = RecordDict({"payload": ArrayRecord({"x": Array(payload)})})
            sent = {}
            for node in nodes:
                one = Message(content=content, dst_node_id=node, message_type="train",
                              group_id=str(number))
                sent[list(grid.push_messages([one]))[0]] = node
            end = time.monotonic() + given["seconds"]
            missing = set(sent)
            while missing and time.monotonic() < end:
                for reply in grid.pull_messages(list(missing)):
                    told = reply.metadata
                    missing.discard(told.reply_to_message_id)
                    line = {
                        "round": number,
                        "to": sent.get(told.reply_to_message_id),
                        "from": told.src_node_id,
                        "error": reply.error.reason if reply.has_error() else None,
                    }
                    print(json.dumps(line), file=output, flush=True)
                time.sleep(0.1)
"""


@dataclass(frozen=True)
class MessageRun:
    """The run, as its operator sees it."""

    run_id: int
    output: Path
    server: RunningServer

    @property
    def replies(self) -> list[dict[str, Any]]:
        text = self.output.read_text() if self.output.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    @property
    def state(self) -> str:
        found = status(self.server.settings, self.run_id)
        return f"{found.state} {found.outcome}".strip()

    def finished(self, patience_s: float = 90.0) -> str:
        wait_until(lambda: self.state.startswith("finished"), timeout_s=patience_s)
        return self.state


def submitted(
    server: RunningServer, folder: Path, nodes: Sequence[int], **config: int
) -> MessageRun:
    """Submit a run with messages for ``nodes``; ``folder`` is made."""
    code = folder / "told"
    code.mkdir(parents=True)
    output = folder / "replies.jsonl"
    (code / "__init__.py").write_text(_CODE)
    (folder / "pyproject.toml").write_text(_PROJECT)
    given = {"nodes": " ".join(map(str, nodes)), "output": str(output)}
    words = [f'{key}="{value}"' for key, value in given.items()]
    words += [f"{key}={value}" for key, value in config.items()]
    command = ("run", folder, CONNECTION, "--format", "json")
    home = server.settings.flower_home
    said = server.flwr(home, *command, "--run-config", " ".join(words))
    found = json.loads(said[said.index("{") :])
    assert "run-id" in found, said
    return MessageRun(int(found["run-id"]), output, server)
