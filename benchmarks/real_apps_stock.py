"""What server and clients of a real federation run: Flower's FedAvg as it comes."""

import itertools
import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

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
    num_clients = int(given["clients"])
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
        initial_arrays=ArrayRecord(tensors_of(str(given["model"]))),
        num_rounds=int(given["rounds"]) + 1,
        evaluate_fn=note_end,  # called before the first round too
    )
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    # The first also brings the app to the nodes.
    Path(str(given["output"])).write_text(json.dumps(seconds[1:]))
