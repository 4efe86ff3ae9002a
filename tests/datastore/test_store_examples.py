"""What may be stored, and how it is named."""

from pathlib import Path

import numpy as np
import pytest
import torch

from knnper.datastore.examples import (
    ExamplesMissingError,
    NewExamples,
    Selection,
    StoreError,
    StoreSpec,
)
from knnper.datastore.store import create_store
from knnper.errors import DataError
from tests.datastore.small_store import examples, ids, new_store


def test_examples_that_do_not_fit_are_refused_as_a_whole(tmp_path: Path) -> None:
    good = examples(2)
    assert good.inputs is not None
    bad = {
        "expected float32 of shape": NewExamples(
            good.embeddings, good.labels, good.inputs[:, :3]
        ),
        "inputs: found none": NewExamples(good.embeddings, good.labels),
        "expected one, or None": NewExamples(
            good.embeddings, good.labels, good.inputs, ("one",)
        ),
        "'x' twice among": NewExamples(
            good.embeddings, good.labels, good.inputs, ("x", "x")
        ),
        "seconds since 1970": NewExamples(
            good.embeddings, good.labels, good.inputs, None, torch.zeros(3)
        ),
        "expected finite seconds": NewExamples(
            good.embeddings,
            good.labels,
            good.inputs,
            None,
            torch.tensor([0.0, torch.nan], dtype=torch.float64),
        ),
    }
    with new_store(tmp_path / "s") as store:
        for message, new in bad.items():
            with pytest.raises(DataError, match=message):
                store.add(new)
        assert len(store) == 0


def test_a_store_without_inputs(tmp_path: Path) -> None:
    with create_store(tmp_path / "s", StoreSpec(4), 6, "model") as store:
        with pytest.raises(DataError, match="created to keep none"):
            store.add(examples(1))
        store.add(NewExamples(torch.ones(1, 6), torch.tensor([3])))
        with pytest.raises(StoreError, match="keeps no raw inputs"):
            store.inputs(store.contents().ids)
        with pytest.raises(StoreError, match="keeps no raw inputs"):
            store.reembed(lambda inputs: inputs, "other")


def test_deleting_everything_by_accident_is_refused(tmp_path: Path) -> None:
    with new_store(tmp_path / "s", 2) as store:
        with pytest.raises(ValueError, match="found one of all"):
            store.delete(Selection())
        assert len(store.delete(Selection(ids=(7,)))) == 0
        assert ids(store) == [1, 2]


@pytest.mark.parametrize("name", ["", "a\0b", "\udce4"])
def test_names_that_cannot_be_stored_are_refused(tmp_path: Path, name: str) -> None:
    good = examples(1)
    with new_store(tmp_path / "s") as store:
        with pytest.raises(DataError, match="external ids: found"):
            store.add(NewExamples(good.embeddings, good.labels, good.inputs, (name,)))
        assert len(store) == 0


def test_a_clock_that_was_set_back_makes_nothing_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_store(tmp_path / "s", 4, policy="fifo", capacity=4) as store:
        monkeypatch.setattr("time.time", lambda: 1000.0)
        store.add(examples(1))
        assert ids(store) == [2, 3, 4, 5]


def test_numpy_integers_select(tmp_path: Path) -> None:
    with new_store(tmp_path / "s", 4) as store:
        chosen = Selection(ids=tuple(store.contents().ids[:2]))
        assert store.delete(chosen).tolist() == [1, 2]


def test_what_has_left_has_no_vector(tmp_path: Path) -> None:
    with new_store(tmp_path / "s", 4) as store:
        store.delete(Selection(ids=(2,)))
        with pytest.raises(ExamplesMissingError):
            store.vectors(np.array([1, 2]))
