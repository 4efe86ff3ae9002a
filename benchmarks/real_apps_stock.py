"""Flower's FedAvg as it comes, with clients that echo; apps of a real federation."""

import itertools
import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from benchmarks.real_models import tensors_of

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def _train(message: Message, context: Context) -> Message:  # noqa: ARG001
    counts = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": counts})
    return Message(content, reply_to=message)


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    given = context.run_config
    tensors = tensors_of(str(given["model"]))
    num_rounds = int(given["rounds"]) + 1
    seconds = make_rounds(grid, tensors, int(given["clients"]), num_rounds)
    # The first also brings the app to the nodes.
    Path(str(given["output"])).write_text(json.dumps(seconds[1:]))


def make_rounds(
    grid: Grid, tensors: dict[str, Tensor], num_clients: int, num_rounds: int
) -> list[float]:
    """Return the seconds of each round with all clients."""
    ends: list[float] = []

    def note_end(server_round: int, arrays: ArrayRecord) -> MetricRecord:  # noqa: ARG001
        ends.append(time.perf_counter())
        return MetricRecord()

    strategy = FedAvg(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=num_clients,
        min_available_nodes=num_clients,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(tensors),
        num_rounds=num_rounds,
        evaluate_fn=note_end,  # called before the first round too
    )
    return [end - start for start, end in itertools.pairwise(ends)]
