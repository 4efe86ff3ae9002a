"""Sites in one process: the real ClientApp behind a grid of functions."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict

from knnper.cli.flower_apps import client_app
from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.partition.export import export_shares
from knnper.simulation.workbench import open_workbench
from knnper.transport.messages import Purpose
from tests.server.fake_grid import FakeGrid

CLIENTS = ("0000", "0001", "0002", "0003")


def experiment(**changes: object) -> Experiment:
    """Return an experiment with four clients, of which 0002 is unseen."""
    return own_experiment(None, changes)


def own_experiment(folder: Path | None, changes: Mapping[str, object]) -> Experiment:
    """Return the same, changed, with code of its user's that lies in ``folder``."""
    document = {
        "name": "four",
        "data": {"name": "digits"},
        "partition": {
            "name": "dirichlet",
            "num_clients": 4,
            "alpha": 0.5,
            "unseen_fraction": 0.25,
            "used_fraction": 0.3,
        },
        "model": {"name": "tiny_cnn", "embedding_dim": 8},
        "training": {"num_rounds": 2, "batch_size": 16},
        "method": {"name": "knn_per"},
        "run": {
            "seed": 0,
            "engine": "serial",
            "validate_every": 1,
            "metrics": ["macro_f1", "auroc"],
            "federation": {"wait_for_clients_s": 5, "grace_s": 0.3, "stay_s": 0},
        },
    }
    overrides = [f"{key}={value}" for key, value in changes.items()]
    return load_experiment(document, experiment_catalogue(), overrides, folder=folder)


def make_sites(folder: Path, settings: Experiment) -> dict[str, Path]:
    """Give each virtual client's share to a site; return the sites' files by name."""
    shares = folder / "shares"
    bench = open_workbench(settings)
    export_shares(bench.clients.dataset, bench.partition, shares)
    files = {}
    for name in CLIENTS:
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(
            f"name: '{name}'\nserver: 127.0.0.1:1\ninsecure: true\n"
            f"state: state-{name}\ndata: {{name: npz, path: shares/{name}.npz}}\n"
        )
    return files


class SiteGrid(FakeGrid):
    """Nodes that run the ClientApp, each for one site's file."""

    def __init__(self, files: dict[int, Path]) -> None:
        super().__init__(self.answer, files)
        self.files = files
        self.answered: list[tuple[int, str]] = []

    def join(self, node: int, file: Path) -> None:
        self.files[node] = file
        self.nodes.add(node)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        for message in sent:
            if message.metadata.message_type == Purpose.REFUSE.value:
                self.answer(message)  # nobody waits for the answer
        return super().push_messages(sent)

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        context = Context(
            run_id=1,
            node_id=node,
            node_config={"config": str(self.files[node])},
            state=RecordDict(),
            run_config={},
        )
        self.answered.append((node, message.metadata.message_type))
        try:
            return client_app(message, context)
        except Exception as error:  # noqa: BLE001 (as Flower does)
            return Message(Error(code=2, reason=repr(error)), reply_to=message)


def simulated(folder: Path, settings: Experiment) -> RunFolder:
    """Run an experiment on the serial engine, for comparison with the sites."""
    run = RunFolder.create(folder, settings)
    simulate(open_workbench(settings), run, Observer(), ["test"])
    return run
