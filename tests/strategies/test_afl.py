"""AFL: its regression by hand, beside the paper's recursion, and under noise."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.errors import ConfigError
from knnper.experiment_file import load_experiment
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.afl import AFL, AFLSettings, solve_ridge, to_matrix, to_vector
from knnper.strategies.core.mean_update import differences, synthetic_update
from knnper.strategies.core.method import AsItIs
from knnper.strategies.core.records import ModelPayload
from tests.strategies.method_checks import document, refused
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    run_rounds,
    two_weights_task,
)

ONCE = {"num_rounds": 1, "participation": 1.0}
FROZEN = {"name": "tiny_cnn", "trained": "head"}
CLIENTS = {name: noisy(7 + i, 2, seed=i) for i, name in enumerate("abc")}


def head_of(method: AFL, weights: Tensor) -> Tensor:
    """Return the weights of the head, (c, p)."""
    return method.task.model.named(weights)["classifier.weight"]


def solved(method: AFL, clients: Mapping[str, ClientData]) -> Tensor:
    state, _ = run_rounds(method, clients, num_rounds=1)
    return head_of(method, state.weights)


def test_regression_by_hand() -> None:
    """Of two pixels (1, 0) and (0, 1) only the sign of their difference is left."""
    method = AFL(linear_task(num_pixels=2), AFLSettings(ridge=0.25, logit_scale=3.0))

    def client(first_pixels: list[int], labels: list[int]) -> ClientData:
        first = torch.tensor(first_pixels, dtype=torch.uint8) * 255
        images = torch.stack([first, 255 - first], dim=1)[:, None, :, None]
        return ClientData(Examples(images, torch.tensor(labels)), noisy(0, 0, 0).train)

    clients = {"a": client([1, 1, 1], [0, 0, 1]), "b": client([0], [1])}
    # x = ±(1, -1) / √2 is the eigenvector of C for the eigenvalue 1. With y = ±½ for
    # the first class, the mean of x y is (½ + ½ - ½ + ½) / 4 = ¼ times (1, -1) / √2.
    expected = 3.0 * 0.25 / math.sqrt(2) / (1 + 0.25)
    head = solved(method, clients)
    rows = [[expected, -expected], [-expected, expected]]
    assert head.tolist() == [pytest.approx(row, abs=1e-6) for row in rows]


def test_clients_together_solve_the_joint_regression() -> None:
    method = AFL(normed_task(), AFLSettings(ridge=0.01))
    everything = ClientData(
        Examples(
            torch.cat([data.train.images for data in CLIENTS.values()]),
            torch.cat([data.train.labels for data in CLIENTS.values()]),
        ),
        CLIENTS["a"].validation,
    )
    examples = everything.train
    rows = method.task.embed(method.task.initial_weights, examples.images).double()
    rows -= rows.mean(dim=1, keepdim=True)
    rows /= rows.norm(dim=1, keepdim=True)
    targets = np.eye(3)[examples.labels] - 1 / 3
    # As least squares with √(n γ) I as further rows.
    ridge = math.sqrt(len(rows) * 0.01) * np.eye(4)
    expected, *_ = np.linalg.lstsq(
        np.vstack([rows.numpy(), ridge]),
        np.vstack([targets, np.zeros((4, 3))]),
        rcond=None,
    )
    for clients in (CLIENTS, {"all": everything}):
        head = solved(method, clients)
        np.testing.assert_allclose(head.numpy(), expected.T, rtol=1e-4, atol=1e-5)


def test_papers_recursion_without_its_regularisation_has_the_same_solution() -> None:
    generator, regularisation = KEY.numpy(), 0.5
    sizes = (3, 9, 5, 8)  # the first has fewer examples than features
    inputs = [generator.normal(size=(size, 4)) for size in sizes]
    targets = [generator.normal(size=(size, 2)) for size in sizes]
    joined: NDArray[Any] = np.zeros((4, 4))
    solution: NDArray[Any] = np.zeros((4, 2))
    for number, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        gram = x.T @ x + regularisation * np.eye(4)
        of_client = np.linalg.solve(gram, x.T @ y)
        if number == 0:
            joined, solution = gram, of_client
            continue
        inverse, inverse_of_client = np.linalg.inv(joined), np.linalg.inv(gram)
        together = np.linalg.inv(joined + gram)
        # The absolute aggregation law.
        weight = np.eye(4) - inverse @ gram @ (np.eye(4) - together @ gram)
        weight_of_client = np.eye(4) - inverse_of_client @ joined @ (
            np.eye(4) - together @ joined
        )
        solution = weight @ solution + weight_of_client @ of_client
        joined = joined + gram
    plain = joined - len(sizes) * regularisation * np.eye(4)
    expected = np.linalg.solve(plain, joined @ solution)
    num_examples = sum(sizes)
    x, y = np.vstack(inputs), np.vstack(targets)
    ours = solve_ridge(
        torch.from_numpy(x.T @ x / num_examples),
        torch.from_numpy(x.T @ y / num_examples),
        ridge=1e-12,
    )
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-6)


def test_vector_has_the_norm_of_the_matrix() -> None:
    matrix = torch.tensor([[1.0, 2.0], [2.0, -5.0]], dtype=torch.float64)
    vector = to_vector(matrix)
    assert vector.tolist() == [1.0, pytest.approx(2 * math.sqrt(2)), -5.0]
    assert float(vector.norm()) == pytest.approx(float(matrix.norm()))
    torch.testing.assert_close(to_matrix(vector, 2), matrix)


@pytest.mark.parametrize("num_features", [None, 2])
def test_norm_of_an_update_is_bounded(num_features: int | None) -> None:
    method = AFL(normed_task(), AFLSettings(num_features=num_features))
    payload = ModelPayload(method.task.initial_weights)
    one_image = noisy(1, 0, seed=1)
    repeated = ClientData(
        one_image.train.take(torch.zeros(9).long()), CLIENTS["a"].train
    )
    for data in (*CLIENTS.values(), repeated):
        _, update = method.client_update(payload, None, data, 1, KEY)
        change = differences(method, payload, update)
        assert 0 < float(change.norm()) <= math.sqrt(2)
    # C and B of equal examples have rank 1: the norms of x xᵀ and x yᵀ.
    assert float(change.norm()) == pytest.approx(math.sqrt(1 + 2 / 3), abs=1e-5)


def test_head_contains_the_projection() -> None:
    task = replace(normed_task(), key=KEY)
    method = AFL(task, AFLSettings(num_features=2, ridge=0.01))
    examples = CLIENTS["a"].train
    signs = KEY.child("projection").numpy().integers(0, 2, (4, 2)) * 2 - 1
    centred = np.eye(4) - 1 / 4
    projection = centred @ signs
    rows = task.embed(task.initial_weights, examples.images).double().numpy()
    rows = rows @ projection
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    gram = rows.T @ rows / len(rows) + 0.01 * np.eye(2)
    targets = rows.T @ (np.eye(3)[examples.labels] - 1 / 3) / len(rows)
    expected = projection @ np.linalg.solve(gram, targets)
    head = solved(method, {"a": CLIENTS["a"]})
    np.testing.assert_allclose(head.numpy(), expected.T, rtol=1e-4, atol=1e-5)


def test_negative_eigenvalues_of_a_noisy_sum_count_as_zero() -> None:
    gram = torch.diag(torch.tensor([2.0, -1.0], dtype=torch.float64))
    targets = torch.tensor([[6.0], [6.0]], dtype=torch.float64)
    solution = solve_ridge(gram, targets, ridge=0.5)
    assert solution.tolist() == [[pytest.approx(2.4)], [pytest.approx(12.0)]]


def test_noisy_mean_gives_a_finite_head() -> None:
    method = AFL(normed_task(), AFLSettings())
    payload = ModelPayload(method.task.initial_weights)
    _, update = method.client_update(payload, None, CLIENTS["a"], 1, KEY)
    change = differences(method, payload, update)
    noise = torch.from_numpy(KEY.numpy().normal(size=len(change))).float()
    noisy_update = synthetic_update(method, payload, update, change + 5 * noise)
    state = method.init(["a"], KEY)
    state = method.aggregate(state, iter([("", noisy_update)]))
    assert bool(state.weights.isfinite().all())


def test_other_experiments_are_refused() -> None:
    known = experiment_catalogue()
    once: dict[str, Any] = {"training": ONCE, "model": FROZEN}
    load_experiment(document("afl", **once), known)
    refused(
        document("afl", **once | {"model": {"name": "tiny_cnn"}}), "model.trained", "h"
    )
    for changes, place in (
        ({"num_rounds": 5}, "training.num_rounds"),
        ({"participation": 0.5}, "training.participation"),
    ):
        sections = once | {"training": ONCE | changes}
        refused(document("afl", **sections), place, "send the statistics of all")


def test_head_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="a head that is no linear layer"):
        AFL(two_weights_task(linear_task().training, 1, 0), AFLSettings())


def test_bytes_are_those_of_the_statistics_below_a_personalisation() -> None:
    method = AFL(linear_task(num_pixels=2), AFLSettings())
    on_top = AsItIs(method.task, method, AsItIs.settings_type())
    # Three numbers of C and four of B.
    assert on_top.bytes_up("a") == method.bytes_up("a") == 4 * (3 + 4)
