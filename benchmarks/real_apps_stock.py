"""Apps of a real federation with stock FedAvg of Flower and echoing clients."""

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
    config = context.run_config
    tensors = tensors_of(str(config["model"]))
    num_rounds = int(config["rounds"]) + 1
    seconds = make_rounds(grid, tensors, int(config["clients"]), num_rounds)
    # The first round also sends the app to the nodes.
    Path(str(config["output"])).write_text(json.dumps(seconds[1:]))


def make_rounds(
    grid: Grid, tensors: dict[str, Tensor], num_clients: int, num_rounds: int
) -> list[float]:
    """Measure the seconds of each round with all clients."""
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
        evaluate_fn=note_end,  # also called before the first round
    )
    return [end - start for start, end in itertools.pairwise(ends)]
