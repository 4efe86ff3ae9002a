"""Another model's embeddings beside those that are searched."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from knnper.datastore.examples import NewExamples, StoreError
from knnper.datastore.store import open_store
from knnper.errors import DataError
from tests.datastore.small_store import examples, new_store


def test_embedding_anew_keeps_the_old_pair_and_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    asked: list[int] = []

    def other(inputs: Tensor) -> Tensor:
        asked.append(len(inputs))
        return torch.cat([inputs, -inputs], dim=1)

    def broken(inputs: Tensor) -> Tensor:
        if asked:
            raise InterruptedError
        return other(inputs)

    with new_store(tmp_path / "s", 600) as store:
        with pytest.raises(InterruptedError):
            store.reembed(broken, "other")
        assert (store.fingerprint, store.embedding_dim, sum(asked)) == ("model", 6, 256)
    with open_store(tmp_path / "s", writable=True) as store:
        store.reembed(other, "other")
        assert (store.fingerprint, store.embedding_dim, sum(asked)) == (
            "other",
            12,
            600,
        )
    with open_store(tmp_path / "s", writable=True) as store:
        assert store.fingerprint == "other"
        store.roll_back()
        assert (store.fingerprint, store.embedding_dim) == ("model", 6)
        assert torch.equal(
            store.vectors(store.contents().ids), examples(600).embeddings
        )
        store.reembed(other, "other")
        assert sum(asked) == 600
        store.add(NewExamples(torch.ones(1, 12), torch.tensor([1]), torch.ones(1, 6)))
        with pytest.raises(StoreError, match="examples arrived after"):
            store.roll_back()
        store.reembed(lambda inputs: inputs * 2, "model")
        assert store.vectors(store.contents().ids)[-1].tolist() == [2.0] * 6
        with pytest.raises(DataError, match="by the new model: expected finite"):
            store.reembed(lambda inputs: inputs * torch.nan, "third")


def test_there_may_be_nothing_to_roll_back_to(tmp_path: Path) -> None:
    with (
        new_store(tmp_path / "s") as store,
        pytest.raises(StoreError, match="nothing to roll back to"),
    ):
        store.roll_back()


def test_an_empty_store_takes_another_model(tmp_path: Path) -> None:
    with new_store(tmp_path / "s") as store:
        store.reembed(lambda inputs: torch.empty((len(inputs), 7)), "other")
        assert (store.fingerprint, store.embedding_dim) == ("other", 7)
        assert len(store) == 0
