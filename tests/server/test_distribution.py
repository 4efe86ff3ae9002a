import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch

from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.server.checkpoints import Checkpoint
from knnper.server.distribution import ModelDistribution
from knnper.server.federation import Federation, Reply, Request, Step
from knnper.strategies.core.evaluation import ClientResult, ClientResults, Evaluation
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import ModelPayload, ModelState
from knnper.transport.messages import Purpose

NOTHING = Evaluation(0, 0, 0.0, (), (), ())
OWN = object()


# Clients that are sent the same are sent the same object.
PAYLOADS = [ModelPayload(torch.tensor([float(length)])) for length in range(5)]


class LengthOfTheName(Method):
    """Sends everyone the length of the name it is known by, and does no more."""

    def __init__(self, together: bool) -> None:
        self.personalizes_by_inference = together

    def broadcast(self, state: ModelState, client: str, rng: RandomKey) -> ModelPayload:
        return PAYLOADS[len(client)]


class Recorder(Federation):
    """Keeps what the clients were sent; one fails, or all answer with ``record``."""

    def __init__(
        self, failing: str = "", record: Any = OWN, away: bool = False
    ) -> None:
        self.failing, self.record, self.may_be_away = failing, record, away
        self.requests: list[Request] = []

    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        assert step[:2] == (Purpose.PERSONALIZE, 7)
        for request in requests:
            self.requests.append(request)
            yield self.answer(request.clients)

    def answer(self, clients: tuple[str, ...]) -> Reply:
        if self.record is not OWN:
            return Reply(clients, self.record, "" if self.record else "lost")
        served = [client for client in clients if client != self.failing]
        results = tuple(result(client) for client in served)
        failures = {client: "no disk" for client in clients if client == self.failing}
        return Reply(clients, ClientResults(results, failures))


def result(client: str, personal: Evaluation = NOTHING) -> ClientResult:
    return ClientResult(client, True, 0, 0, personal, NOTHING, NOTHING)


def distribute(
    recorder: Recorder,
    sizes: Mapping[str, int],
    seen: Iterable[str],
    done: Iterable[str] = (),
    together: bool = False,
) -> Iterator[tuple[str, ClientResult | None]]:
    trained = Checkpoint(7, ModelState(torch.zeros(1)), "abc")
    distribution = ModelDistribution(LengthOfTheName(together), recorder, RandomKey(0))
    groups = distribution.personalize(trained, sizes, set(seen), set(done))
    return itertools.chain.from_iterable(group.items() for group in groups)


def served(
    recorder: Recorder, *clients: str
) -> Iterator[tuple[str, ClientResult | None]]:
    """Serve some clients together."""
    return distribute(recorder, dict.fromkeys(clients, 1), clients, together=True)


def groups(done: set[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the clients of each request, and those with results."""
    sizes = {"a": 600, "b": 10, "c": 400, "e": 2000, "d": 500, "f": 1}
    recorder = Recorder()
    results = dict(distribute(recorder, sizes, "acdef", done, together=True))
    return [request.clients for request in recorder.requests], list(results)


def test_unseen_clients_get_the_payload_of_an_unknown_client() -> None:
    recorder = Recorder()
    results = dict(distribute(recorder, {"aa": 1, "bbb": 1}, {"aa"}))
    assert list(results) == ["aa", "bbb"]
    seen, unseen = recorder.requests
    assert isinstance(seen.payload, ModelPayload)
    assert seen.payload.weights.tolist() == [2.0]
    assert unseen.payload is unseen.reference
    assert isinstance(unseen.payload, ModelPayload)
    assert unseen.payload.weights.tolist() == [0.0]


@pytest.mark.parametrize(("done", "reported"), [("", "eacdfb"), ("ad", "ecfb")])
def test_clients_are_served_together_up_to_a_number_of_images(
    done: str, reported: str
) -> None:
    requested, clients = groups(set(done))
    # 600 + 400 fit into 1024; b is unseen, so it is not sent the same.
    assert requested == [("e",), ("a", "c"), ("d", "f"), ("b",)]
    assert clients == list(reported)


def test_failed_client_does_not_affect_others_of_its_group() -> None:
    results = served(Recorder(failing="b"), "a", "b", "c")
    assert [next(results)[0], next(results)[0]] == ["a", "c"]
    with pytest.raises(RunError, match="client b could not personalise: no disk"):
        next(results)


def test_client_with_another_payload_is_served_apart() -> None:
    recorder = Recorder()
    list(served(recorder, "a", "b", "cc", "dd", "e"))
    requested = [request.clients for request in recorder.requests]
    assert requested == [("a", "b"), ("cc", "dd"), ("e",)]
    sent = [request.payload for request in recorder.requests]
    assert sent == [PAYLOADS[1], PAYLOADS[2], PAYLOADS[1]]


@pytest.mark.parametrize(
    "record", [None, ClientResults(()), ClientResults((), {"x": "who?"})]
)
def test_an_answer_that_is_not_about_the_clients_is_an_error(
    record: ClientResults | None,
) -> None:
    with pytest.raises(RunError, match=r"could not personalise: lost|results of a, b"):
        list(served(Recorder(record=record), "a", "b"))


def test_offline_client_is_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder(failing="b", away=True)
    assert list(dict(served(recorder, "a", "b", "c"))) == ["a", "c"]
    assert "client b could not personalise: no disk" in caplog.text


def test_client_that_withholds_metrics_still_gets_the_model() -> None:
    withheld = ClientResults((), {}, withheld=("a",))
    assert list(served(Recorder(record=withheld), "a")) == [("a", None)]


def telling(*results: ClientResult) -> Recorder:
    return Recorder(record=ClientResults(results), away=True)


def test_a_report_about_others_does_not_end_a_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = telling(result("x\n"))
    assert list(served(recorder, "a")) == []
    assert "expected results of a, found those of x\\n" in caplog.text


def test_a_report_that_cannot_be_true_is_its_client_s_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = Evaluation(1, 99, 0.0, (), (), ())
    recorder = telling(result("a", wrong), result("b"))
    assert list(dict(served(recorder, "a", "b"))) == ["b"]
    assert "client a could not personalise: 99 of 1 examples" in caplog.text


def test_whether_a_client_is_seen_the_server_knows() -> None:
    ((_, served),) = distribute(telling(result("aa")), {"aa": 1}, seen=())
    assert served is not None
    assert not served.seen
