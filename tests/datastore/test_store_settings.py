"""Policy, capacity, budget and kind of index of a store."""

from pathlib import Path

import pytest
import torch

from knnper.datastore.examples import (
    InputLayout,
    NewExamples,
    StoreError,
    StoreFullError,
    StoreSpec,
)
from knnper.datastore.index import GraphSettings
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import (
    configure_store,
    create_store,
    open_store,
    read_identity,
)
from knnper.errors import ConfigError
from tests.datastore.small_store import examples, ids, new_store


@pytest.mark.parametrize("policy", ["fixed", "fifo", "reservoir", "class_balanced"])
def test_policies_that_need_a_capacity_say_so(tmp_path: Path, policy: str) -> None:
    with pytest.raises(
        ConfigError, match=f"capacity: found none with policy = {policy}"
    ):
        new_store(tmp_path / "s", policy=policy)
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_holds_no_example_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"budget_mb: found 1e-05, expected at least"):
        new_store(tmp_path / "s", budget_mb=1e-5)


@pytest.mark.parametrize("policy", ["fifo", "reservoir"])
@pytest.mark.parametrize("shape", [(32, 32, 3), (3,), (200, 100)])
@pytest.mark.parametrize("dim", [16, 700])
def test_a_store_stays_within_its_budget(
    tmp_path: Path, policy: str, shape: tuple[int, ...], dim: int
) -> None:
    spec = StoreSpec(2, InputLayout(shape))
    settings = StoreSettings(policy, budget_mb=3.0)  # type: ignore[arg-type]
    with create_store(tmp_path / "s", spec, dim, "model", settings) as store:
        capacity = store.capacity
        assert capacity is not None
        for _ in range(6):
            inputs = torch.ones(capacity // 2, *shape, dtype=torch.uint8)
            labels = torch.zeros(len(inputs), dtype=torch.int64)
            store.add(NewExamples(torch.ones(len(inputs), dim), labels, inputs))
        assert len(store) == capacity
    used = sum(path.stat().st_size for path in (tmp_path / "s").rglob("*.*"))
    assert 1.9e6 < used < 3.0e6


def test_more_can_be_allowed_later_but_not_less_than_there_is(tmp_path: Path) -> None:
    new_store(tmp_path / "s", 8, policy="fifo", capacity=8).close()
    with pytest.raises(StoreError, match=r"found room for 7 .* at least the 8"):
        configure_store(tmp_path / "s", StoreSettings("fifo", 7))
    settings = StoreSettings("fifo", 9, index=GraphSettings())
    configure_store(tmp_path / "s", settings)
    assert read_identity(tmp_path / "s").settings == settings
    with open_store(tmp_path / "s", writable=True) as store:
        store.add(examples(2))
        assert ids(store) == [2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_another_model_s_embeddings_must_fit_the_budget(tmp_path: Path) -> None:
    with new_store(tmp_path / "s", policy="fifo", budget_mb=0.2) as store:
        capacity = store.capacity
        assert capacity is not None
        store.add(examples(capacity))
        with pytest.raises(StoreFullError, match="600 numbers the budget has room"):
            store.reembed(lambda inputs: inputs.repeat(1, 100), "large")
        assert store.fingerprint == "model"
