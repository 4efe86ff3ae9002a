"""Inputs of a memory: layouts, tables, loaders, data sets; labels, names, networks."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from knnper.datastore.local_memory import LocalMemory
from knnper.errors import ConfigError, DataError, OwnCodeError

datasets: Any = pytest.importorskip("datasets")
COUNT, DIM = 60, 4
FEATURES = np.random.default_rng(0).normal(size=(COUNT, DIM)).astype(np.float32)
LABELS = np.arange(COUNT) % 3
NAMES = [f"person-{row}" for row in range(COUNT)]
COLUMNS = ["age", "height", "weight", "pulse"]
PAIRS = TensorDataset(torch.from_numpy(FEATURES), torch.from_numpy(LABELS))


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251 (a test's own weights)
        return nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Linear(8, 3))


def frame(values: NDArray[Any] = FEATURES) -> Any:
    return pd.DataFrame(values, columns=COLUMNS)


@pytest.fixture(params=["alone", "with a model"])
def model(request: pytest.FixtureRequest) -> nn.Module | None:
    return None if request.param == "alone" else network()


# Layouts and types of arrays and tensors


def memory_mapped(path: Path) -> NDArray[Any]:
    np.save(path, FEATURES)
    mapped: NDArray[Any] = np.load(path, mmap_mode="r")
    return mapped


def read_only() -> NDArray[Any]:
    copied = FEATURES.copy()
    copied.setflags(write=False)
    return copied


ARRAYS: dict[str, Callable[[Path], Any]] = {
    "rows flipped": lambda _: FEATURES[::-1].copy()[::-1],
    "columns flipped": lambda _: np.ascontiguousarray(FEATURES[:, ::-1])[:, ::-1],
    "every second": lambda _: np.repeat(FEATURES, 2, axis=0)[::2],
    "big-endian": lambda _: FEATURES.astype(">f4"),
    "Fortran": lambda _: np.asfortranarray(FEATURES),
    "read-only": lambda _: read_only(),
    "memory-mapped": lambda folder: memory_mapped(folder / "x.npy"),
    "longdouble": lambda _: FEATURES.astype(np.longdouble),
    "big-endian float64": lambda _: FEATURES.astype(">f8"),
    "objects": lambda _: FEATURES.astype(object),
    "not masked": lambda _: np.ma.masked_array(FEATURES),
    "list of arrays": lambda _: list(FEATURES),
    "list of tensors": lambda _: list(torch.from_numpy(FEATURES)),
    "tensor, columns first": lambda _: torch.from_numpy(FEATURES).T.contiguous().T,
    "tensor, sparse": lambda _: torch.from_numpy(FEATURES).to_sparse(),
    "tensor, negated view": lambda _: torch._neg_view(torch.from_numpy(-FEATURES)),
    "tensor with gradient": lambda _: torch.from_numpy(FEATURES).requires_grad_(),
    "table, nullable": lambda _: frame().astype("Float32"),
}


@pytest.mark.parametrize("layout", ARRAYS)
def test_a_layout_changes_no_prediction(
    model: nn.Module | None, layout: str, tmp_path: Path
) -> None:
    inputs = ARRAYS[layout](tmp_path)
    expected = LocalMemory(model).fit(FEATURES, LABELS)
    actual = LocalMemory(model).fit(inputs, LABELS)
    np.testing.assert_array_equal(
        actual.predict_proba(inputs), expected.predict_proba(FEATURES)
    )


@pytest.mark.parametrize("dtype", [np.float16, torch.bfloat16, np.uint16, np.int8])
def test_numbers_of_a_coarser_type_are_what_they_say(dtype: Any) -> None:
    whole = (FEATURES * 10).round() + 40
    inputs = (
        torch.from_numpy(whole).to(dtype)
        if isinstance(dtype, torch.dtype)
        else whole.astype(dtype)
    )
    expected = LocalMemory().fit(whole, LABELS)
    actual = LocalMemory().fit(inputs, LABELS)
    np.testing.assert_array_equal(
        actual.predict_proba(inputs), expected.predict_proba(whole)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_model_gets_numbers_of_its_own_precision(dtype: torch.dtype) -> None:
    inputs = torch.from_numpy(FEATURES).to(dtype)
    memory = LocalMemory(network().to(dtype)).fit(FEATURES, LABELS)
    np.testing.assert_array_equal(
        memory.predict_proba(FEATURES), memory.predict_proba(inputs)
    )
    single = LocalMemory(network()).fit(inputs, LABELS)
    assert single.score(inputs, LABELS) > 0.5


def test_flipped_images_are_those_of_their_copy() -> None:
    images = np.random.default_rng(0).normal(size=(12, 3, 4, 4)).astype(np.float32)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    memory = LocalMemory(nn.Sequential(*layers)).fit(images[..., ::-1], LABELS[:12])
    expected = memory.predict_proba(images[..., ::-1].copy())
    tensor = torch.from_numpy(images[..., ::-1].copy())
    for source in (
        images[..., ::-1],
        tensor.contiguous(memory_format=torch.channels_last),
        tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    ):
        np.testing.assert_allclose(memory.predict_proba(source), expected, atol=1e-6)


def test_tables_of_whole_numbers_and_truth_values_reach_a_model() -> None:
    table = pd.DataFrame({"a": LABELS, "b": LABELS > 0, "c": LABELS, "d": 1})
    expected = LocalMemory(network()).fit(table.to_numpy(np.float32), LABELS)
    actual = LocalMemory(network()).fit(table, LABELS)
    np.testing.assert_array_equal(
        actual.predict_proba(table), expected.predict_proba(table.to_numpy(np.float32))
    )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.ma.masked_greater(FEATURES, 2), "masked values"),
        (FEATURES.astype(complex), "Complex data not supported"),
        (np.array([["a"] * DIM] * COUNT), "arrays of bytes/strings"),
        (pd.DataFrame({"a": ["x"] * COUNT}), "could not convert"),
        (np.full((COUNT, 1), np.datetime64("2024-01-01")), "found datetime64"),
        (
            pd.DataFrame({"day": pd.date_range("2024", periods=COUNT), "a": 1.0}),
            "the column day holds datetime64",
        ),
        (frame().astype("Float64").mask(FEATURES > 2), "NaN"),
        (FEATURES * np.float64(1e39), "too large"),
        (FEATURES[:, 0], r"Expected 2D|found shape \(60,\)"),
        (np.float64(3), "[Ee]xpected 2D array|at least 1 dimension"),
    ],
)
def test_what_is_no_numbers_is_refused(
    model: nn.Module | None, inputs: Any, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        LocalMemory(model).fit(inputs, LABELS)


def test_query_of_another_shape_is_refused() -> None:
    memory = LocalMemory(network()).fit(FEATURES, LABELS)
    with pytest.raises(ValueError, match=r"found shape \(4,\), expected \(n, \.\.\.\)"):
        memory.predict(FEATURES[0])
    with pytest.raises(ValueError, match=r"failed on inputs torch.float32 of shape"):
        memory.predict(FEATURES[:, :3])


# Names of columns


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "reordered": lambda table: table[COLUMNS[::-1]],
    "renamed": lambda table: table.rename(columns={"age": "years"}),
    "missing": lambda table: table[COLUMNS[:3]],
    "extra": lambda table: table.assign(more=1.0),
}


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("change", QUESTIONS)
def test_columns_are_those_of_fit(
    model: nn.Module | None, change: str, is_loaded: bool, tmp_path: Path
) -> None:
    table, expected = frame(), LocalMemory(model).fit(FEATURES, LABELS)
    memory = LocalMemory(model).fit(table, LABELS)
    if is_loaded:
        memory.save(tmp_path / "memory")
        memory = LocalMemory.load(tmp_path / "memory", model)
    other = QUESTIONS[change](table)
    with memory:
        np.testing.assert_array_equal(
            memory.predict_proba(table), expected.predict_proba(FEATURES)
        )
        for question in (
            lambda: memory.predict(other),
            lambda: memory.score(other, LABELS),
            lambda: memory.neighbors(other),
            lambda: memory.partial_fit(other, LABELS),
        ):
            with pytest.raises(ValueError, match="The feature names should match"):
                question()
        with pytest.warns(UserWarning, match="does not have valid feature names"):
            memory.predict(FEATURES)
        assert len(memory.store_) == COUNT


def test_numbered_columns_are_distinguished() -> None:
    table = pd.DataFrame(FEATURES, columns=[2020, 2021, 2022, 2023])
    memory = LocalMemory().fit(table, LABELS)
    with pytest.raises(ValueError, match="must be in the same order"):
        memory.predict(table[[2023, 2022, 2021, 2020]])
    plain = LocalMemory().fit(pd.DataFrame(FEATURES), LABELS)
    plain.predict(FEATURES)
    with pytest.warns(UserWarning, match="was fitted without feature names"):
        plain.predict(pd.DataFrame(FEATURES)[[3, 2, 1, 0]])


# Numbers that float32 cannot tell apart


def test_times_are_distinguished_as_by_scikit_learn(tmp_path: Path) -> None:
    seconds = 1.7e9 + np.arange(120)[:, None]
    table = np.hstack([seconds, 2.0**60 + seconds * 2048, np.full_like(seconds, 0.1)])
    labels = np.arange(120) // 40
    oracle = KNeighborsClassifier(3).fit(table, labels)
    memory = LocalMemory(num_neighbors=3).fit(table[::2], labels[::2])
    memory.partial_fit(table[1::2], labels[1::2])
    memory.save(tmp_path / "memory")
    distances = np.sort(oracle.kneighbors(table)[0], axis=1)
    with LocalMemory.load(tmp_path / "memory") as loaded:
        for memory_or_copy in (memory, loaded, copy.deepcopy(memory)):
            assert (
                memory_or_copy.score(table, labels) == oracle.score(table, labels) == 1
            )
            actual = memory_or_copy.neighbors(table).distances
            np.testing.assert_allclose(actual, distances, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-50, 1e-43])
def test_numbers_too_small_for_float32_are_warned_of(scale: float) -> None:
    table = frame(FEATURES.astype(np.float64))
    table["age"] *= scale
    with pytest.warns(
        UserWarning, match="of the columns age differ by less than float32"
    ):
        LocalMemory().fit(table, LABELS)


def test_numbers_that_float32_holds_are_stored_as_they_are() -> None:
    for inputs in (FEATURES, FEATURES.astype(np.float64), FEATURES.round() + 1000):
        memory = LocalMemory().fit(inputs, LABELS)
        stored = memory.store_.vectors(memory.store_.contents().ids)
        np.testing.assert_array_equal(stored.numpy(), inputs.astype(np.float32))


# Loaders and data sets


class Numbered(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT - 1, -1, -1))

    def __len__(self) -> int:
        return COUNT


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(PAIRS)


def batched(sampler: Any) -> DataLoader[Any]:
    return DataLoader(PAIRS, batch_sampler=BatchSampler(sampler, 16, drop_last=False))


def of_one_process(*, shuffle: bool) -> Any:
    kind: Any = DistributedSampler
    return kind(PAIRS, num_replicas=1, rank=0, shuffle=shuffle)


SHUFFLING: dict[str, DataLoader[Any]] = {
    "shuffle=True": DataLoader(PAIRS, 16, shuffle=True),
    "RandomSampler in a batch sampler": batched(RandomSampler(PAIRS)),
    "weighted": DataLoader(
        PAIRS, 16, sampler=WeightedRandomSampler([1.0] * COUNT, COUNT)
    ),
    "subset": DataLoader(PAIRS, 16, sampler=SubsetRandomSampler(range(COUNT))),
    "distributed": DataLoader(PAIRS, 16, sampler=of_one_process(shuffle=True)),
}
UNKNOWN: dict[str, Any] = {
    "own sampler": DataLoader(PAIRS, 16, sampler=Numbered()),
    "own batch sampler": DataLoader(PAIRS, batch_sampler=[[2, 1], [0]]),
    "one process": DataLoader(PAIRS, 16, sampler=of_one_process(shuffle=False)),
    "iterable": DataLoader(Stream(), 16),
    "iterable data set": Stream(),
}


@pytest.mark.parametrize("kind", [*SHUFFLING, *UNKNOWN])
def test_names_need_an_order_that_is_known(kind: str) -> None:
    loader = {**SHUFFLING, **UNKNOWN}[kind]
    memory = LocalMemory().fit(FEATURES, LABELS)
    attempts: list[Callable[[], object]] = [
        lambda: LocalMemory().fit(loader, names=NAMES),
        lambda: LocalMemory().fit(FEATURES, LABELS, loader, names_val=NAMES),
        lambda: memory.partial_fit(loader, names=NAMES),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError, match="names: cannot be matched"):
            attempt()
    with pytest.raises(ValueError, match="y: cannot be matched"):
        LocalMemory().fit(loader, LABELS)
    assert len(memory.store_) == COUNT
    LocalMemory().fit(loader)


@pytest.mark.parametrize("kind", SHUFFLING)
def test_a_loader_that_shuffles_has_a_score_but_no_predictions(kind: str) -> None:
    memory, loader = LocalMemory().fit(FEATURES, LABELS), SHUFFLING[kind]
    for question in (memory.predict, memory.predict_proba, memory.neighbors):
        with pytest.raises(ValueError, match="found a loader that shuffles"):
            question(loader)
    with pytest.raises(ValueError, match="y: cannot be matched"):
        memory.score(loader, LABELS)
    if kind != "weighted":
        assert memory.score(loader) == memory.score(FEATURES, LABELS)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_predictions_in_an_order_of_the_loaders_own_are_warned_of(kind: str) -> None:
    memory, loader = LocalMemory().fit(FEATURES, LABELS), UNKNOWN[kind]
    with pytest.warns(UserWarning, match="decides the order of the inputs"):
        memory.predict(loader)
    memory.score(loader)


def test_loaders_in_order_and_subsets_keep_names_with_their_examples() -> None:
    reverse = range(COUNT - 1, -1, -1)
    for source, names in (
        (DataLoader(PAIRS, 16), NAMES),
        (PAIRS, NAMES),
        (batched(SequentialSampler(PAIRS)), NAMES),
        (Subset(PAIRS, reverse), [NAMES[row] for row in reverse]),
    ):
        memory = LocalMemory().fit(source, names=names)
        assert memory.neighbors(FEATURES).names[:, 0].tolist() == NAMES


def test_examples_that_a_loader_drops_are_counted() -> None:
    loader = DataLoader(PAIRS, 16, drop_last=True)
    with pytest.warns(UserWarning, match="drop_last leaves out the last 12 examples"):
        memory = LocalMemory().fit(loader)
    with pytest.warns(UserWarning, match="drop_last"):
        assert len(memory.predict(loader)) == 48
    with (
        pytest.warns(UserWarning, match="drop_last"),
        pytest.raises(DataError, match="found 60"),
    ):
        LocalMemory().fit(loader, names=NAMES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LocalMemory().fit(DataLoader(PAIRS, 15, drop_last=True))


class Items(Dataset[Any]):
    def __init__(self, item: Callable[[Tensor, int], Any]) -> None:
        self._item = item

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> Any:
        return self._item(torch.from_numpy(FEATURES[row]), int(LABELS[row]))


MAPPINGS: dict[str, Callable[[Tensor, int], Any]] = {
    "img": lambda x, y: {"img": x, "label": y},
    "image, labels": lambda x, y: {"image": x, "labels": y, "id": 3},
    "CIFAR-100": lambda x, y: {"img": x, "fine_label": y, "coarse_label": 0},
    "one key beside the label": lambda x, y: {"anything": x, "label": y},
    "three parts": lambda x, y: (x, y, 7),
}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_batches_are_pairs_or_mappings(model: nn.Module | None, kind: str) -> None:
    expected = LocalMemory(model).fit(FEATURES, LABELS)
    items = Items(MAPPINGS[kind])
    for source in (items, DataLoader(items, 16)):
        memory = LocalMemory(model).fit(source)
        np.testing.assert_allclose(
            memory.predict_proba(source), expected.predict_proba(FEATURES), atol=1e-6
        )
        assert memory.score(source) == expected.score(FEATURES, LABELS)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (lambda x, y: {"left": x, "right": x, "label": y}, "keys left, right, label"),
        (lambda x, y: {"img": x, "image": x, "label": y}, "exactly one of img, image"),
        (lambda x, y: {"img": x, "label": y, "labels": y}, "at most one of label"),
        (lambda x, y: ((x, x), y), "found inputs in 2 parts"),
        (lambda x, y: {"x": x.tolist(), "label": y}, "found inputs in 4 parts"),
        (lambda x, y: (Image.new("L", (2, 2)), y), "a transform that returns tensors"),
    ],
)
def test_other_batches_are_refused_with_what_is_taken(item: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalMemory(network()).fit(Items(item))


def test_other_collections_are_refused_with_what_is_taken() -> None:
    with pytest.raises(ValueError, match="found a dict with the keys img, label"):
        LocalMemory().fit({"img": FEATURES, "label": LABELS})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set its batch_size"):
        LocalMemory().fit(DataLoader(PAIRS, batch_size=None))


def test_data_sets_of_hugging_face_are_read(model: nn.Module | None) -> None:
    columns = {"x": FEATURES.tolist(), "label": LABELS.tolist()}
    plain = datasets.Dataset.from_dict(columns)
    expected = LocalMemory(model).fit(FEATURES, LABELS).predict_proba(FEATURES)
    for source in (plain, plain.with_format("torch"), plain.with_format("numpy")):
        memory = LocalMemory(model).fit(source, names=NAMES)
        np.testing.assert_allclose(memory.predict_proba(source), expected, atol=1e-6)
        assert memory.neighbors(FEATURES[7:8]).names[0, 0] == NAMES[7]
    transformed = plain.with_transform(
        lambda batch: {
            "img": [torch.tensor(row) for row in batch["x"]],
            "label": batch["label"],
        }
    )
    loader = DataLoader(transformed, batch_size=16)
    for source in (transformed, loader):
        memory = LocalMemory(model).fit(source)
        np.testing.assert_allclose(memory.predict_proba(source), expected, atol=1e-6)
    with pytest.raises(ValueError, match="found a DatasetDict with the keys train"):
        LocalMemory(model).fit(datasets.DatasetDict({"train": plain}))
    table = datasets.Dataset.from_dict({"age": [1.0], "height": [2.0], "label": [0]})
    with pytest.raises(ValueError, match="one column a feature as a DataFrame"):
        LocalMemory().fit(table)


# Labels and names


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA, pd.NaT])
def test_a_missing_label_is_named_by_its_row(missing: Any) -> None:
    words = np.array(list("abc"), dtype=object)[LABELS]
    words[3] = missing
    for labels in (words, words.tolist(), pd.Series(words, dtype=object)):
        with pytest.raises(ValueError, match="as the label of row 3"):
            LocalMemory().fit(FEATURES, labels)
    with pytest.raises(ValueError, match="as the label of row 3"):
        LocalMemory().fit(FEATURES, pd.Series(words).astype("string"))


@pytest.mark.parametrize("dtype", ["Int64", "string", "category", "boolean"])
def test_labels_may_be_columns_of_any_type(dtype: str) -> None:
    plain = LABELS > 0 if dtype == "boolean" else LABELS
    memory = LocalMemory(num_neighbors=1)
    labels = pd.Series(plain.astype(str) if dtype == "string" else plain).astype(dtype)
    assert memory.fit(FEATURES, labels).score(FEATURES, labels) == 1


def test_a_missing_name_is_none() -> None:
    names = pd.Series(NAMES, dtype=object)
    names[4], names[5] = np.nan, pd.NA
    memory = LocalMemory().fit(FEATURES, LABELS, names=names)
    actual = memory.neighbors(FEATURES[3:6]).names[:, 0]
    assert actual.tolist() == [NAMES[3], None, None]


def test_names_and_labels_are_sequences() -> None:
    memory = LocalMemory().fit(FEATURES, LABELS, names=NAMES)
    with pytest.raises(ValueError, match=r"found 0 \(int\) in row 0"):
        LocalMemory().fit(FEATURES, LABELS, names=range(COUNT))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="found the text 'abc'"):
        LocalMemory().fit(FEATURES[:3], LABELS[:3], names="abc")
    with pytest.raises(ValueError, match="found the text 'person-7'"):
        memory.forget(names="person-7")
    with pytest.raises(ValueError, match="labels: found 'cat'"):
        memory.forget(labels="cat")
    with pytest.raises(TypeError, match="integer"):
        memory.forget(indices=[1.5])  # type: ignore[list-item]
    assert len(memory.store_) == COUNT


# Networks


class NamedNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.body(x)
        return self.head(self.kept)  # type: ignore[no-any-return]


def with_former_weight_norm() -> nn.Module:
    module = NamedNetwork()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.head = nn.utils.weight_norm(module.head)
    return module


def after_a_forward_pass() -> nn.Module:
    module = NamedNetwork()
    module(torch.zeros(2, DIM))
    return module


@pytest.mark.parametrize("make", [with_former_weight_norm, after_a_forward_pass])
def test_a_network_that_holds_a_graph_is_copied(make: Callable[[], nn.Module]) -> None:
    module = make()
    memory = LocalMemory(module, knn_weights=[0.0]).fit(FEATURES, LABELS)
    with torch.no_grad():
        expected = torch.softmax(module(torch.from_numpy(FEATURES)), dim=1)
    np.testing.assert_allclose(memory.predict_proba(FEATURES), expected, atol=1e-6)


def test_wrappers_are_looked_through(tmp_path: Path) -> None:
    plain = network()
    LocalMemory(plain).fit(FEATURES, LABELS).save(tmp_path / "memory")
    # torch.compile's wrapper without its compiler, which takes seconds to import.
    compiled = nn.Sequential(plain)
    compiled._orig_mod = plain
    for wrapped in (nn.DataParallel(plain), compiled):
        with LocalMemory.load(tmp_path / "memory", wrapped) as memory:
            memory.predict(FEATURES)
        LocalMemory(wrapped).fit(FEATURES, LABELS)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(network())


def traced_part() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace: Any = torch.jit.trace
        body = trace(nn.Linear(DIM, 8), torch.zeros(2, DIM))
    return nn.Sequential(body, nn.Linear(8, 3))


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantise: Any = torch.ao.quantization.quantize_dynamic
        module: nn.Module = quantise(network(), {nn.Linear}, dtype=torch.qint8)
    return module


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (scripted, "found a RecursiveScriptModule, which gives no access"),
        (traced_part, "as its layer '0', which gives no access"),
        (quantised, "which is no plain tensor of numbers"),
        (lazy, "the parameter '0.weight' of a lazy layer"),
    ],
)
def test_networks_that_cannot_be_split_are_refused(
    make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalMemory(make()).fit(FEATURES, LABELS)


def test_error_of_a_network_names_the_input_type() -> None:
    with pytest.raises(OwnCodeError, match=r"failed on inputs torch.int64 of shape"):
        LocalMemory(network()).fit(FEATURES.astype(np.int64), LABELS)
