import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from knnper.data.examples import ClientData, Examples, no_examples
from knnper.embedding_model import EmbeddingModel
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import UNSEEN_CLIENT, Method
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fedattn import (
    Attention,
    FedAttn,
    FedAttnPayload,
    FedAttnSettings,
    FedAttnState,
    FedAttnUpdate,
    KnownClients,
    Memory,
    attend,
    bias_mask,
    gradients,
    nearest,
    new_attention,
)
from tests.strategies.tiny import (
    KEY,
    ONE_PIXEL,
    noisy,
    normed_task,
    one_model_of,
    run_rounds,
    task_of,
    text_task,
)

ONE_ROUND = TrainingSettings(num_rounds=1, learning_rate=1.0)


class AffineModel(EmbeddingModel):
    """Logits w x + b of one pixel x, two classes, at first 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = 1, 2
        self.classifier = nn.Linear(1, 2)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def embed(self, x: Tensor) -> Tensor:
        return x.flatten(start_dim=1)


def affine_task(training: TrainingSettings) -> Task:
    """Return a task for `AffineModel`: the weights are (w_0, w_1, b_0, b_1)."""
    return task_of(AffineModel, ONE_PIXEL, training)


def one_pixel(value: int, label: int) -> ClientData:
    images = torch.full((1, 1, 1, 1), value, dtype=torch.uint8)
    return ClientData(Examples(images, torch.tensor([label])), no_examples(ONE_PIXEL))


CLIENTS = {"a": one_pixel(255, 0), "b": one_pixel(0, 1)}


def fedattn_of(task: Task, **given: Any) -> Method:
    return FedAttn(task, FedAttnSettings(**given))


def served(method: Method, payload: FedAttnPayload, data: ClientData) -> Tensor:
    return one_model_of(method, payload, None, data, RandomKey(0)).weights


def test_first_round_by_hand() -> None:
    state, _ = run_rounds(fedattn_of(affine_task(ONE_ROUND)), CLIENTS, num_rounds=1)
    # a: x = 1 and p - y = (-½, ½) for w and b. b: x = 0, so only b moves, by (½, -½).
    # The global model is the mean, and what is known is each client's own.
    assert state.weights.tolist() == [0.25, -0.25, 0.0, 0.0]
    assert state.known.names == ("a", "b")
    assert state.known.memory.representations.tolist() == [[1.0], [0.0]]
    assert state.known.memory.values.tolist() == [[0.5, -0.5], [-0.5, 0.5]]


def test_biases_of_neighbours_replace_the_global_biases() -> None:
    task = affine_task(ONE_ROUND)
    state, _ = run_rounds(fedattn_of(task), CLIENTS, num_rounds=1)
    alone = fedattn_of(task, num_neighbors=1).broadcast(state, "a", KEY)
    assert alone.weights.tolist() == [0.25, -0.25, 0.5, -0.5]
    # The attention begins as the mean of both neighbours' biases.
    both = fedattn_of(task, num_neighbors=2).broadcast(state, "a", KEY)
    assert both.weights.tolist() == [0.25, -0.25, 0.0, 0.0]
    assert alone.biases.tolist() == [0.0, 0.0]
    assert alone.memory is None


def test_the_attention_steps_along_the_mean_of_the_returned_changes() -> None:
    task = affine_task(TrainingSettings(num_rounds=9))
    memory = Memory(torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0, 0], [4.0, 6]]))
    even = Attention(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([1.0, 1.0]))
    known = KnownClients(("a", "b"), memory)
    state = FedAttnState(torch.zeros(4), even, known, num_rounds=3)
    updates = [
        (name, FedAttnUpdate(torch.tensor(weights), size, 0.5, torch.tensor([z])))
        for name, size, weights, z in [
            ("a", 1, [0.0, 0, 2, 3], 5.0),
            ("b", 3, [0.0, 0, 3, 0], 6.0),
            ("c", 1, [0.0, 0, 100, 100], 7.0),
        ]
    ]
    method = fedattn_of(task, attention_learning_rate=0.5)
    after = method.aggregate(state, iter(updates))
    # Both were sent (3, 3). ΔM̃ is (1, 0) and (0, 3), and that of W_V is ΔM̃ (3, 3):
    # the mean of (3, 0) and (0, 9) steps by half, whatever the clients' sizes. c was
    # sent what attention had no part in.
    assert after.attention.value.tolist() == [1 - 0.75, 1 - 2.25]
    assert after.known.names == ("a", "b", "c")
    assert after.known.memory.values.tolist() == [[2, 3], [3, 0], [100, 100]]
    assert after.known.memory.representations.tolist() == [[5.0], [6.0], [7.0]]
    assert after.weights.tolist() == pytest.approx([0, 0, 111 / 5, 103 / 5])
    assert after.num_rounds == 4
    fixed = fedattn_of(task, attention_learning_rate=0.0)
    assert torch.equal(
        fixed.aggregate(state, iter(updates)).attention.value, even.value
    )


@pytest.mark.parametrize(
    ("make", "expected", "number"),
    [
        (
            normed_task,
            ["classifier.bias", "features.0.bias", "features.1.bias"],
            4 + 4 + 3,
        ),
        # Four gates of five units, twice, and four classes.
        (
            lambda: text_task(hidden_dim=5),
            ["classifier.linear.bias", "layers.0.bias_hh_l0", "layers.0.bias_ih_l0"],
            2 * 20 + 4,
        ),
    ],
)
def test_biases_are_found_by_what_they_are(
    make: Callable[[], Task], expected: list[str], number: int
) -> None:
    task = make()
    mask = bias_mask(task)
    names = task.model.named(mask.float())
    assert sorted(name for name, part in names.items() if part.any()) == expected
    assert int(mask.sum()) == number


def test_what_a_client_gets_is_weighed_by_the_attention() -> None:
    task = affine_task(ONE_ROUND)
    memory = Memory(torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0, 0], [4.0, 6]]))
    unit = torch.ones(1, 1)
    attention = Attention(unit, unit, torch.tensor([0.5, 3.0]))
    known = KnownClients(("a", "b"), memory)
    state = FedAttnState(torch.zeros(4), attention, known, num_rounds=1)
    # z = 1 has the scores 0 and 1 with a and b: shares 1 - σ(1) and σ(1).
    share = 0.7310586
    expected = [0, 0, 0.5 * (2 * (1 - share) + 4 * share), 3 * 6 * share]
    method = fedattn_of(task, attention_dim=1, num_neighbors=2)
    sent = method.broadcast(state, "b", KEY)
    assert sent.weights.tolist() == pytest.approx(expected)
    unseen = method.broadcast(state, UNSEEN_CLIENT, KEY)
    assert served(method, unseen, CLIENTS["a"]).tolist() == pytest.approx(expected)


def test_a_representation_is_that_of_the_trained_model() -> None:
    task = normed_task(num_rounds=1, learning_rate=0.5)
    data, start = noisy(6, 0, 1), task.initial_weights
    payload = FedAttnPayload(start, start[bias_mask(task)])
    _, update = fedattn_of(task).client_update(payload, None, data, 1, KEY)
    after = task.embed(update.weights, data.train.images).mean(dim=0)
    before = task.embed(start, data.train.images).mean(dim=0)
    assert torch.equal(update.representation, after)
    assert not torch.allclose(after, before, atol=1e-2)


def test_an_unseen_client_is_represented_by_the_global_model() -> None:
    task, data = normed_task(ONE_ROUND), noisy(6, 0, 1)
    first, trained = task.initial_weights, task.fresh_weights(KEY)
    # One known client is where the global model puts the unseen client, one where the
    # initial weights do.
    places = [
        task.embed(weights, data.train.images).mean(dim=0)
        for weights in (trained, first)
    ]
    values = torch.stack([torch.full((11,), 2.0), torch.full((11,), 5.0)])
    even = Attention(torch.zeros(1, 4), torch.zeros(1, 4), torch.ones(11))
    payload = FedAttnPayload(
        trained, torch.zeros(11), even, Memory(torch.stack(places), values)
    )
    method = fedattn_of(task, attention_dim=1, num_neighbors=1)
    predictor = served(method, payload, data)
    assert torch.equal(predictor[bias_mask(task)], values[0])


def test_biases_are_personal_after_the_warm_up() -> None:
    task = normed_task(num_rounds=4, batch_size=3)
    method = fedattn_of(task, warm_up_fraction=0.5)
    clients = {name: noisy(5, 0, seed=i) for i, name in enumerate("abc")}
    assert run_rounds(method, clients, num_rounds=2)[0].known.names == ()
    assert run_rounds(method, clients, num_rounds=3)[0].known.names == ("a", "b", "c")


def test_a_strong_pull_keeps_the_biases_global() -> None:
    task = normed_task(num_rounds=2, learning_rate=0.1, weight_decay=0.5)
    start, where = task.initial_weights, bias_mask(task)
    center = torch.full((11,), 0.5)

    def trained(weight: float) -> Tensor:
        method = fedattn_of(task, bias_prox_weight=weight)
        payload = FedAttnPayload(start, center)
        _, update = method.client_update(payload, None, noisy(6, 0, 1), 1, KEY)
        return update.weights  # type: ignore[no-any-return]

    free, pulled = trained(0.0), trained(1e6)
    plain = local_sgd(task, start, noisy(6, 0, 1).train, 0.1, KEY)
    assert plain.num_steps == 1
    assert torch.equal(free, plain.weights)
    torch.testing.assert_close(pulled[where], center, rtol=0, atol=1e-4)
    assert not torch.allclose(free[where], center, atol=1e-2)
    # The others are trained as ever: the first step changes them alike.
    assert torch.equal(pulled[~where], free[~where])


def test_an_unseen_client_makes_its_own_biases() -> None:
    method = fedattn_of(affine_task(ONE_ROUND), num_neighbors=1)
    state, _ = run_rounds(method, CLIENTS, num_rounds=1)
    payload = method.broadcast(state, UNSEEN_CLIENT, KEY)
    # By its pixels one unseen client is like a, whatever its labels, the other like b.
    like_a = served(method, payload, one_pixel(200, 1))
    assert like_a.tolist() == [0.25, -0.25, 0.5, -0.5]
    like_b = served(method, payload, one_pixel(100, 0))
    assert like_b.tolist() == [0.25, -0.25, -0.5, 0.5]
    nothing = ClientData(CLIENTS["a"].validation, CLIENTS["a"].validation)
    for client in ("a", UNSEEN_CLIENT):
        sent = method.broadcast(state, client, KEY)
        assert torch.equal(served(method, sent, nothing), state.weights)


def test_what_is_known_of_others_travels_only_at_the_end() -> None:
    method = fedattn_of(affine_task(TrainingSettings(num_rounds=2)))
    for num_rounds, travels in ((1, False), (2, True)):
        state, _ = run_rounds(method, CLIENTS, num_rounds)
        payload = method.broadcast(state, "never visited", KEY)
        assert (payload.memory is not None) == travels
        assert method.broadcast(state, "a", KEY).memory is None


ATTENTION = Attention(
    torch.tensor([[2.0]]), torch.tensor([[1.0]]), torch.tensor([1.0, 3.0])
)
HALF_LOG_3 = math.log(3) / 2
MEMORY = Memory(
    torch.tensor([[0.0], [HALF_LOG_3]]), torch.tensor([[4.0, 0.0], [0.0, 4.0]])
)
ASKS = torch.tensor([1.0])


def test_attention_by_hand() -> None:
    # The query is 2, so the scores are 0 and ln 3 and the shares ¼ and ¾: the mean of
    # the values is (1, 3), and W_V makes (1, 9) of it.
    attention = attend(ATTENTION, ASKS, MEMORY)
    assert attention.tolist() == pytest.approx([1.0, 9.0], rel=1e-6)


def test_scores_are_divided_by_the_root_of_their_size() -> None:
    four = Attention(
        torch.full((4, 1), 1.0), torch.full((4, 1), 1.0), torch.tensor([1.0, 1.0])
    )
    # Scores 4 z_j / √4, of which the second is ln 3 again.
    attention = attend(four, ASKS, MEMORY)
    assert attention.tolist() == pytest.approx([1.0, 3.0], rel=1e-6)


def test_gradients_by_hand() -> None:
    trained = torch.tensor([0.0, 9.0])
    of_query, of_key, of_value = gradients(ATTENTION, ASKS, MEMORY, trained)
    # ΔM̃ = (1, 0). A score has share_j (c_j - 1) with c = (4, 0): ¾ and -¾.
    assert of_value.tolist() == pytest.approx([1.0, 0.0], abs=1e-5)
    assert float(of_query) == pytest.approx(-0.75 * HALF_LOG_3, rel=1e-5)
    assert float(of_key) == pytest.approx(-0.75 * HALF_LOG_3 * 2, rel=1e-5)


def test_a_new_attention_is_the_mean_of_the_values() -> None:
    attention = new_attention(8, 3, 2, RandomKey(1))
    memory = Memory(torch.randn(4, 3), torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]))
    assert attend(attention, torch.randn(3), memory).tolist() == [4.0, 5.0]
    of_query, of_key, _ = gradients(
        attention, torch.ones(3), memory, torch.tensor([0.0, 0.0])
    )
    assert float(of_query.norm()) > 0
    assert float(of_key.norm()) == 0


@settings(max_examples=30, deadline=None)
@given(
    places=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    asks=st.integers(0, 4),
    count=st.integers(1, 35),
)
def test_the_nearest_are_those_of_a_full_sort(
    places: list[int], asks: int, count: int
) -> None:
    rows = list(range(len(places)))
    memory = Memory(
        torch.tensor(places, dtype=torch.float32)[:, None],
        torch.tensor(rows, dtype=torch.float32)[:, None],
    )
    positions = nearest(memory, torch.tensor([float(asks)]), count)
    expected = sorted(rows, key=lambda row: (abs(places[row] - asks), row))[:count]
    assert positions.values[:, 0].tolist() == expected
