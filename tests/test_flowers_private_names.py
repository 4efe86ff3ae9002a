"""What Flower keeps to itself is imported in two files.

That a simulation does without it, with the same results, is `test_parity`'s.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = [
    *("knnper", "client", "server", "simulation", "strategies"),
    *("datastore", "papers", "docker"),
]
ALLOWED = {"client/flower_node.py", "simulation/flower_nodes.py"}

PUBLIC = {
    *("flwr", "flwr.app", "flwr.clientapp", "flwr.clientapp.mod", "flwr.common"),
    *("flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation"),
}
PROTOCOL = "flwr.proto."  # made from the published .proto files


def test_private_names_are_in_two_files() -> None:
    found = {
        file.relative_to(ROOT).as_posix()
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        if any(True for _ in private_names(file.read_text()))
    }
    assert found == ALLOWED


def test_what_is_private() -> None:
    for code in (
        "from flwr.app import Message",
        "from flwr.proto.fleet_pb2 import ActivateNodeRequest",
        "import flwr",
    ):
        assert not list(private_names(code)), code
    for code in (
        "from flwr.supercore.run import Run",
        "def f():\n    import flwr.supernode.main",
        "from flwr.simulation import _x",
        "from flwr.common.constant import ErrorCode",
        "from flwr import supernode",
    ):
        assert list(private_names(code)), code


def private_names(code: str) -> Iterator[str]:
    """Yield what is imported of ``flwr`` that is not public."""
    tree = ast.parse(code if "flwr" in code else "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [one.name for one in node.names]
            names = [""]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            names = [one.name for one in node.names]
        else:
            continue
        for module in modules:
            if not f"{module}.".startswith("flwr."):
                continue
            for name in names:
                whole = f"{module}.{name}" if module == "flwr" and name else module
                is_known = whole in PUBLIC or whole.startswith(PROTOCOL)
                if not is_known or name.startswith("_"):
                    yield f"{module}.{name}"
