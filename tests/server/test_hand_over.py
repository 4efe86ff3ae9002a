from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from knnper.config.errors import RunError
from knnper.config.seeding import RandomKey
from knnper.transport.messages import Purpose
from server.checkpoint import Checkpoint
from server.federation import Reply, Request
from server.hand_over import HandOver
from strategies.core.evaluation import ClientResult, Evaluation
from strategies.core.method import Method
from strategies.core.records import ModelPayload, ModelState, ModelUpdate

NOTHING = Evaluation(0, 0, 0.0, (), (), ())


def method() -> Method:
    def never(*_: Any) -> Any:
        raise AssertionError("the server does not call this")

    def broadcast(state: ModelState, client: str, rng: RandomKey) -> ModelPayload:
        """Send everyone the length of the name it is known by."""
        return ModelPayload(torch.tensor([float(len(client))]))

    return Method(
        init=never,
        broadcast=broadcast,
        client_update=never,
        aggregate=never,
        personalize=never,
        state_type=ModelState,
        payload_type=ModelPayload,
        update_type=ModelUpdate,
        num_rounds=1,
    )


class Recorder:
    """Keeps what the clients were sent; one of them fails."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.requests: list[Request] = []

    def exchange(
        self,
        purpose: Purpose,
        server_round: int,
        keep_round: int,
        requests: Iterable[Request],
    ) -> Iterator[Reply]:
        assert (purpose, server_round) == (Purpose.PERSONALIZE, 7)
        for request in requests:
            self.requests.append(request)
            if request.client == self.failing:
                yield Reply(request.client, None, "no disk")
                continue
            result = ClientResult(request.client, True, 0, 0, NOTHING, NOTHING, NOTHING)
            yield Reply(request.client, result)


def hand_over(recorder: Recorder) -> list[ClientResult]:
    trained = Checkpoint(7, ModelState(torch.zeros(1)), "abc")
    made = HandOver(method(), recorder, RandomKey(0))
    return list(made.personalize(trained, ["aa", "bbb"], seen={"aa"}))


def test_unseen_clients_get_what_nobody_in_particular_gets() -> None:
    recorder = Recorder()
    results = hand_over(recorder)
    assert [result.client for result in results] == ["aa", "bbb"]
    seen, unseen = recorder.requests
    assert isinstance(seen.payload, ModelPayload)
    assert seen.payload.weights.tolist() == [2.0]
    assert unseen.payload is unseen.reference
    assert isinstance(unseen.payload, ModelPayload)
    assert unseen.payload.weights.tolist() == [0.0]


def test_a_client_that_cannot_personalise_is_named() -> None:
    with pytest.raises(RunError, match="client bbb could not personalise: no disk"):
        hand_over(Recorder(failing="bbb"))
