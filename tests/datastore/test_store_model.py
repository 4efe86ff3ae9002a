"""Both forms of the store against a plain Python model, for every policy and index."""

import itertools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray
from torch import Tensor

from knnper.datastore import index as indexes
from knnper.datastore.examples import InputLayout, NewExamples, Selection, StoreSpec
from knnper.datastore.policy import POLICIES, PolicyName, StoreSettings
from knnper.datastore.store import (
    StoreReader,
    create_store,
    empty_memory_store,
    open_store,
)
from knnper.seeding import RandomKey
from tests.datastore.index_kinds import KINDS

NUM_CLASSES, INPUT_DIM = 3, 8
SPEC = StoreSpec(NUM_CLASSES, InputLayout((INPUT_DIM,)))


MODELS: dict[str, Callable[[Tensor], Tensor]] = {
    "first": lambda inputs: inputs.float(),
    "second": lambda inputs: torch.cat([3 - inputs.float(), inputs.float() * 2], dim=1),
}
Drawn = tuple[int, float, bool, list[int]]
"""Label, arrival, whether it has a name, input."""
inputs = st.lists(st.integers(0, 4), min_size=INPUT_DIM, max_size=INPUT_DIM)
example = st.tuples(
    st.integers(0, NUM_CLASSES - 1), st.floats(0, 9), st.booleans(), inputs
)
examples = st.lists(example, min_size=1, max_size=7)


@dataclass(frozen=True)
class Stored:
    """One example, as the model remembers it."""

    id: int
    label: int
    arrival: float
    external_id: str | None
    input: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """What a store should hold: a tuple, and nothing clever."""

    policy: str
    capacity: int
    held: tuple[Stored, ...] = ()

    def offer(self, new: Stored) -> "Model":
        """Return the model after one more example; random policies are not modelled."""
        if len(self.held) < self.capacity or self.policy == "concatenate":
            return replace(self, held=(*self.held, new))
        if self.policy == "fixed":
            return self
        together = (*self.held, new)
        oldest = min(together, key=lambda each: (each.arrival, each.id))
        return replace(self, held=together).without({oldest.id})

    def without(self, ids: set[int]) -> "Model":
        return replace(self, held=tuple(x for x in self.held if x.id not in ids))


class StoreMachine(RuleBasedStateMachine):
    """The history of one store."""

    policy: PolicyName
    index: indexes.IndexSettings
    capacity = 6

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="knnper-store-"))
        capacity = None if self.policy == "concatenate" else self.capacity
        self.settings = StoreSettings(self.policy, capacity, seed=3, index=self.index)
        folder = self.root / "store"
        self.disk = create_store(folder, SPEC, INPUT_DIM, "first", self.settings)
        self.memory = empty_memory_store(SPEC, INPUT_DIM, "first", self.settings)
        self.reader = open_store(folder)
        self.model = Model(self.policy, self.capacity)
        self.num_offered = 0
        self.embedded_by = {"first"}

    def teardown(self) -> None:
        self.reader.close()
        self.disk.close()
        shutil.rmtree(self.root)

    @property
    def stores(self) -> tuple[StoreReader, ...]:
        return self.disk, self.memory, self.reader

    def new_examples(self, drawn: list[Stored]) -> NewExamples:
        inputs = torch.tensor([example.input for example in drawn], dtype=torch.uint8)
        return NewExamples(
            MODELS[self.disk.fingerprint](inputs),
            torch.tensor([example.label for example in drawn]),
            inputs,
            tuple(example.external_id for example in drawn),
            torch.tensor([example.arrival for example in drawn], dtype=torch.float64),
        )

    @rule(drawn=examples)
    def add(self, drawn: list[Drawn]) -> None:
        self.store_all(drawn)

    def store_all(self, drawn: list[Drawn]) -> None:
        arriving = [
            Stored(
                id=self.num_offered + number,
                label=label,
                arrival=arrival,
                external_id=f"x{self.num_offered + number}" if named else None,
                input=tuple(values),
            )
            for number, (label, arrival, named, values) in enumerate(drawn, start=1)
        ]
        new = self.new_examples(arriving)
        outcomes = [store.add(new) for store in (self.disk, self.memory)]
        assert np.array_equal(outcomes[0].ids, outcomes[1].ids)
        assert np.array_equal(outcomes[0].evicted, outcomes[1].evicted)
        self.num_offered += len(arriving)
        if self.policy in ("reservoir", "class_balanced"):
            # Chance decides; the two stores have agreed on what it said.
            evicted = set(outcomes[0].evicted.tolist())
            assert evicted <= {example.id for example in self.model.held}
            kept = [
                example
                for example in arriving
                if example.id in outcomes[0].ids.tolist()
            ]
            left = self.model.without(evicted)
            self.model = replace(left, held=(*left.held, *kept))
            return
        for example in arriving:
            self.model = self.model.offer(example)

    @rule(seed=st.integers(0, 10**6))
    def add_many(self, seed: int) -> None:
        generator = RandomKey(seed).numpy()
        count = self.capacity - 2
        values = generator.integers(0, 5, (count, INPUT_DIM)).tolist()
        labels = generator.integers(0, NUM_CLASSES, count).tolist()
        pairs = zip(labels, values, strict=True)
        self.store_all([(label, 5.0, False, row) for label, row in pairs])

    @rule(pick=st.integers(0, 100))
    def add_a_name_that_is_taken(self, pick: int) -> None:
        named = [example for example in self.model.held if example.external_id]
        if named:
            with pytest.raises(Exception, match="is stored already"):
                self.disk.add(self.new_examples([named[pick % len(named)]]))

    @rule(ids=st.sets(st.integers(1, 40), min_size=1, max_size=4))
    def delete_ids(self, ids: set[int]) -> None:
        self.delete(Selection(ids=tuple(ids)), lambda example: example.id in ids)

    @rule(label=st.integers(0, NUM_CLASSES - 1), start=st.floats(0, 9))
    def delete_a_label_from_a_time_on(self, label: int, start: float) -> None:
        self.delete(
            Selection(labels=(label,), arrived_from=start, arrived_before=start + 3),
            lambda example: (
                example.label == label and start <= example.arrival < start + 3
            ),
        )

    @rule(number=st.integers(1, 40))
    def delete_a_name(self, number: int) -> None:
        name = f"x{number}"
        self.delete(
            Selection(external_ids=(name,)), lambda example: example.external_id == name
        )

    def delete(self, selection: Selection, chosen) -> None:  # type: ignore[no-untyped-def]
        expected = {example.id for example in self.model.held if chosen(example)}
        for store in (self.disk, self.memory):
            assert set(store.delete(selection).tolist()) == expected
        self.model = self.model.without(expected)

    @rule(queries=st.lists(inputs, min_size=1, max_size=3), k=st.integers(1, 15))
    def search(self, queries: list[list[int]], k: int) -> None:
        embeddings = MODELS[self.disk.fingerprint](
            torch.tensor(queries, dtype=torch.uint8)
        )
        for store in self.stores:
            self.require_neighbors(store, embeddings, k)

    def require_neighbors(self, store: StoreReader, embeddings: Tensor, k: int) -> None:
        neighbors, held = store.search(embeddings, k), self.model.held
        count = min(k, len(held))
        assert neighbors.ids.shape == (len(embeddings), count)
        if count == 0:
            return
        ids, labels = np.array([(example.id, example.label) for example in held]).T
        places = np.searchsorted(ids, neighbors.ids.numpy())
        assert (ids[places] == neighbors.ids.numpy()).all()
        assert (np.diff(np.sort(places, axis=1)) > 0).all()
        assert (labels[places] == neighbors.labels.numpy()).all()
        vectors = torch.stack(self.vectors())
        distances = squared_distances(embeddings, vectors)
        order = np.argsort(distances, axis=1, kind="stable")[:, :count]
        least = np.take_along_axis(distances, order, axis=1)
        exact = np.take_along_axis(distances, places, axis=1)
        if self.settings.index.is_exhaustive:
            assert (places == order).all()
        if self.settings.index in (KINDS["half"], KINDS["scalar"]):
            # Half precision holds these inputs exactly, 8 bits nearly.
            encoded = squared_distances(embeddings, in_learned_range(store, vectors))
            expected = np.take_along_axis(encoded, places, axis=1)
            np.testing.assert_allclose(
                neighbors.squared_distances, expected, rtol=0.1, atol=0.5
            )
        if self.settings.index.ranks_exactly:
            np.testing.assert_allclose(neighbors.squared_distances, exact, rtol=1e-12)
            assert (neighbors.squared_distances.numpy() >= least - 1e-9).all()

    def vectors(self) -> list[Tensor]:
        inputs = [example.input for example in self.model.held]
        stacked = torch.tensor(inputs, dtype=torch.uint8).reshape(-1, INPUT_DIM)
        return list(MODELS[self.disk.fingerprint](stacked))

    @precondition(lambda self: self.model.held)
    @rule(goes_back=st.booleans())
    def embed_by_the_other_model(self, goes_back: bool) -> None:
        before = self.disk.fingerprint
        other = "second" if before == "first" else "first"
        for store in (self.disk, self.memory):
            store.reembed(MODELS[other], other)
            if goes_back:
                store.roll_back()
            assert store.fingerprint == (before if goes_back else other)

    @rule(loses_index=st.booleans())
    def close_and_open(self, loses_index: bool) -> None:
        self.disk.close()
        if loses_index:
            shutil.rmtree(self.root / "store" / "index", ignore_errors=True)
        self.disk = open_store(self.root / "store", writable=True)

    @rule()
    def compact(self) -> None:
        self.disk.compact()

    @invariant()
    def all_hold_what_the_model_holds(self) -> None:
        held = self.model.held
        if self.settings.capacity is not None:
            assert len(held) <= self.settings.capacity
        for store in self.stores:
            contents = store.contents()
            assert contents.ids.tolist() == [example.id for example in held]
            assert contents.labels.tolist() == [example.label for example in held]
            assert contents.arrivals.tolist() == [example.arrival for example in held]
            assert sorted(store._live.view.index.ids.tolist()) == contents.ids.tolist()
            assert store.external_ids(contents.ids) == [
                example.external_id for example in held
            ]
            if held:
                inputs = [list(example.input) for example in held]
                assert store.inputs(contents.ids).tolist() == inputs
                expected = torch.stack(self.vectors())
                assert torch.equal(store.vectors(contents.ids), expected)


def squared_distances(queries: Tensor, vectors: Tensor) -> NDArray[np.float64]:
    differences = queries.double()[:, None] - vectors.double()[None]
    distances: NDArray[np.float64] = (differences**2).sum(dim=2).numpy()
    return distances


def in_learned_range(store: StoreReader, vectors: Tensor) -> Tensor:
    """Cut vectors (n, p) like 8-bit codes, to the range of the training sample."""
    index = store._live.view.index
    assert isinstance(index, indexes.FactoryIndex)
    quantizer = getattr(index._index, "sq", None)
    # An index that waits for its sample is flat; half precision learns no range.
    if quantizer is None or quantizer.trained.size() == 0:
        return vectors
    least, extent = np.split(faiss.vector_to_array(quantizer.trained), 2)
    return vectors.clamp(torch.from_numpy(least), torch.from_numpy(least + extent))


COMBINATIONS = list(itertools.product(POLICIES, KINDS))


def run_histories(
    policy: str, index: indexes.IndexSettings, count: int, steps: int, capacity: int = 6
) -> None:
    attributes = {"policy": policy, "index": index, "capacity": capacity}
    machine = type("Machine", (StoreMachine,), attributes)
    profile = settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=profile)


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (policy, kind)
        for policy, kind in COMBINATIONS
        if policy == "fifo" or kind == "flat"
    ],
)
def test_short_histories(policy: str, kind: str) -> None:
    run_histories(policy, KINDS[kind], 3, 20)


@pytest.mark.parametrize("kind", ["lists", "scalar", "product", "reranked"])
def test_short_histories_of_trained_indexes(kind: str) -> None:
    # More than `train_size` examples are stored.
    run_histories("fifo", KINDS[kind], 2, 20, capacity=24)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "kind"), COMBINATIONS)
def test_long_histories(policy: str, kind: str) -> None:
    run_histories(policy, KINDS[kind], 30, 50)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["lists", "scalar", "product", "reranked"])
def test_long_histories_of_trained_indexes(policy: str, kind: str) -> None:
    run_histories(policy, KINDS[kind], 15, 50, capacity=24)
