"""Apps of a real federation that makes rounds like our runs."""

import json
import time
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from benchmarks.real_models import tensors_of
from knnper.client.flower_node import quick_pulls
from knnper.server.federation import Request, Step
from knnper.server.flower_federation import FlowerFederation
from knnper.server.sites import OVER_NETWORK
from knnper.strategies.core.averaging import average_weights
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.transport.messages import Purpose, pack, packed_of, to_content, unpack

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def _train(message: Message, context: Context) -> Message:  # noqa: ARG001
    packed = packed_of(message.content, "payload")
    assert packed is not None
    payload = unpack(ModelPayload, packed)
    reply = pack(ModelUpdate(payload.weights, 1, 0.0))
    return Message(to_content(None, {"reply": reply}), reply_to=message)


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = _wait_for_nodes(grid, int(config["clients"]))
    federation = FlowerFederation(
        grid=grid,
        choose_node=lambda name: nodes[int(name)],
        update_type=ModelUpdate,
        experiment="",
        run_folder="",
        patience=OVER_NETWORK,
    )
    tensors = tensors_of(str(config["model"])).values()
    weights = torch.cat([tensor.flatten() for tensor in tensors])
    seconds: list[float] = []
    with quick_pulls():
        for server_round in range(int(config["rounds"]) + 1):
            began = time.perf_counter()
            weights = _make_round(federation, server_round, len(nodes), weights)
            seconds.append(time.perf_counter() - began)
    # The first round also sends the app to the nodes.
    Path(str(config["output"])).write_text(json.dumps(seconds[1:]))


def _make_round(
    federation: FlowerFederation,
    server_round: int,
    num_clients: int,
    weights: torch.Tensor,
) -> torch.Tensor:
    payload = ModelPayload(weights)
    requests = [Request((str(client),), payload) for client in range(num_clients)]
    replies = federation.exchange(Step(Purpose.TRAIN, server_round, [0]), requests)
    return average_weights((reply.client, reply.record) for reply in replies).weights


def _wait_for_nodes(grid: Grid, count: int) -> list[int]:
    while len(nodes := sorted(grid.get_node_ids())) < count:
        time.sleep(0.1)
    return nodes
