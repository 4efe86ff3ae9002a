"""Scores of examples on a line, by hand."""

import numpy as np
import pytest
import torch
from torch import Tensor

from knnper.datastore.examples import Neighbors
from papers.drift_alarm import (
    label_scores,
    leave_one_out_scores,
    neighbor_scores,
)
from tests.papers.clusters import ListedMemory

LINE = ListedMemory(torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([0, 0, 1]))
EMPTY = ListedMemory(torch.empty(0, 1), torch.empty(0, dtype=torch.int64))


def test_mean_distance_to_the_nearest() -> None:
    queries = torch.tensor([[0.5], [4.0]])

    assert neighbor_scores(LINE, queries, 1).tolist() == [0.5, 1.0]
    assert neighbor_scores(LINE, queries, 2).tolist() == [0.5, 2.0]
    assert neighbor_scores(LINE, queries, 9) == pytest.approx([3.5 / 3, 8 / 3])


def test_leaving_oneself_out() -> None:
    assert leave_one_out_scores(LINE, 1).tolist() == [1.0, 1.0, 2.0]
    assert leave_one_out_scores(LINE, 2).tolist() == [2.0, 1.5, 2.5]
    assert leave_one_out_scores(LINE, 9).tolist() == [2.0, 1.5, 2.5]


def test_leaving_oneself_out_among_equal_examples() -> None:
    memory = ListedMemory(
        torch.tensor([[1.0]] * 5 + [[2.0]]), torch.zeros(6, dtype=torch.int64)
    )

    assert leave_one_out_scores(memory, 2).tolist() == [0, 0, 0, 0, 0, 1]


class ForgetfulMemory(ListedMemory):
    """Finds everything but the example of which the query is a copy."""

    def search(self, queries: Tensor, num_neighbors: int) -> Neighbors:
        found = super().search(queries, num_neighbors + 1)
        return Neighbors(
            found.squared_distances[:, 1:], found.labels[:, 1:], found.ids[:, 1:]
        )


def test_leaving_oneself_out_where_the_search_misses_it() -> None:
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    memory = ForgetfulMemory(line, torch.tensor([0, 0, 1, 1]))

    assert leave_one_out_scores(memory, 1).tolist() == [1.0, 1.0, 2.0, 4.0]


def test_mean_distance_to_the_nearest_of_the_same_label() -> None:
    queries = torch.tensor([[4.0], [4.0], [4.0], [0.0]])
    labels = torch.tensor([0, 1, 2, 1])

    assert label_scores(LINE, queries, labels, 1).tolist() == [3, 1, np.inf, 3]
    assert label_scores(LINE, queries, labels, 2).tolist() == [3.5, 1, np.inf, 3]


def test_no_examples_have_no_scores() -> None:
    none, no_labels = torch.empty(0, 1), torch.empty(0, dtype=torch.int64)

    assert neighbor_scores(LINE, none, 2).shape == (0,)
    assert label_scores(LINE, none, no_labels, 2).shape == (0,)


def test_too_few_stored_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"at least 1 stored .*, found 0; add examples"
    ):
        neighbor_scores(EMPTY, torch.zeros(1, 1), 1)
    one = ListedMemory(torch.zeros(1, 1), torch.tensor([0]))
    with pytest.raises(
        ValueError, match=r"at least 2 stored .*, found 1; add examples"
    ):
        leave_one_out_scores(one, 1)
