"""The memory in scikit-learn's manner: its figures, its data, what it keeps on disk."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from knnper.datastore.examples import StoreBusyError, StoreError, StoreMismatchError
from knnper.datastore.local_memory import LocalMemory
from knnper.datastore.memory import PAPER_KNN_WEIGHTS
from knnper.errors import ConfigError, DataError, OwnCodeError, RunError
from tests.fresh_process import run_fresh

PIXELS, LABELS = load_digits(return_X_y=True)
# A little noise: no two examples are equally far from a third.
NOISE = np.random.default_rng(0).normal(scale=1e-3, size=PIXELS.shape)
PIXELS = (PIXELS / 16 + NOISE).astype(np.float32)
TRAIN, HELD_OUT, ASKED = slice(0, 300), slice(300, 500), slice(500, 700)


class Net(nn.Module):
    """Random features and a random head: the neighbours know more than it does."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.classifier = nn.Linear(64, 32), nn.Linear(32, 10)
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.representation(x))  # type: ignore[no-any-return]

    def representation(self, x: Tensor) -> Tensor:
        return torch.relu(self.features(self.dropout(x)))


@pytest.fixture(scope="module")
def model() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251 (a test's own weights)
        return Net()


def by_scikit_learn(embeddings: NDArray[Any], queries: NDArray[Any]) -> NDArray[Any]:
    """Return p_kNN of ten neighbours with the weights exp(-d)."""
    oracle = KNeighborsClassifier(10, weights=lambda d: np.exp(-d), algorithm="brute")
    oracle.fit(embeddings.astype(np.float64), LABELS[: len(embeddings)])
    probabilities: NDArray[Any] = oracle.predict_proba(queries.astype(np.float64))
    return probabilities


# None is expected to fail. scikit-learn skips two by itself: the one that needs the
# variable SCIPY_ARRAY_API, and where pandas is missing, the one of its tables.
@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [LocalMemory(), LocalMemory(kernel="squared", num_neighbors=3)]
)
def test_it_is_an_estimator_as_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_without_a_model_the_neighbours_decide() -> None:
    memory = LocalMemory().fit(PIXELS[TRAIN], LABELS[TRAIN])
    expected = by_scikit_learn(PIXELS[TRAIN], PIXELS[ASKED])
    probabilities = memory.predict_proba(PIXELS[ASKED])
    np.testing.assert_allclose(probabilities, expected, atol=1e-4)
    assert memory.knn_weight_ == 1


def test_with_a_model_it_chooses_how_much_the_neighbours_count(model: Net) -> None:
    memory = LocalMemory(model)
    memory.fit(PIXELS[TRAIN], LABELS[TRAIN], PIXELS[HELD_OUT], LABELS[HELD_OUT])
    both = slice(0, HELD_OUT.stop)
    with torch.inference_mode():
        embeddings = model.eval().representation(torch.from_numpy(PIXELS))
        alone = torch.softmax(model.classifier(embeddings), dim=1).numpy()
    z = embeddings.numpy()
    model.train()

    # λ is right most often on what was held out; of equals it is the smallest.
    votes = by_scikit_learn(z[TRAIN], z[HELD_OUT])
    right = [
        (
            (w * votes + (1 - w) * alone[HELD_OUT]).argmax(axis=1) == LABELS[HELD_OUT]
        ).sum()
        for w in PAPER_KNN_WEIGHTS
    ]
    assert memory.knn_weight_ == PAPER_KNN_WEIGHTS[int(np.argmax(right))]
    assert 0 < memory.knn_weight_ <= 1

    # What is served knows the held-out examples, too.
    votes, weight = by_scikit_learn(z[both], z[ASKED]), memory.knn_weight_
    expected = weight * votes + (1 - weight) * alone[ASKED]
    probabilities = memory.predict_proba(PIXELS[ASKED])
    np.testing.assert_allclose(probabilities, expected, atol=1e-4)
    explained = memory.explain(PIXELS[ASKED])
    np.testing.assert_allclose(explained.global_probabilities, alone[ASKED], atol=1e-5)


def test_without_held_out_examples_each_is_held_against_the_others(model: Net) -> None:
    labels = np.arange(60) % 2
    inputs = np.random.default_rng(0).normal(size=(60, 64)) + 3 * labels[:, None]
    memory = LocalMemory(model, knn_weights=[0.0, 1.0]).fit(inputs, labels)
    assert memory.knn_weight_ == 1, "the neighbours are right, the random model is not"
    # Labels without meaning: the neighbours are no better than the model's own guess.
    memory.fit(inputs, model_says(model, inputs))
    assert memory.knn_weight_ == 0, "the model is right; of equals the smallest counts"


def model_says(model: Net, inputs: NDArray[Any]) -> NDArray[Any]:
    memory = LocalMemory(model, knn_weights=[0.0])
    memory.fit(inputs[:2], [0, 1])
    return memory.predict(inputs)


def test_arrays_tensors_data_sets_and_loaders_are_the_same(model: Net) -> None:
    inputs, labels = torch.from_numpy(PIXELS[TRAIN]), torch.from_numpy(LABELS[TRAIN])
    pairs = TensorDataset(inputs, labels)
    loader = DataLoader(pairs, batch_size=50)
    for of in (None, model):
        first = LocalMemory(of, batch_size=50).fit(PIXELS[TRAIN], LABELS[TRAIN])
        expected = first.predict_proba(PIXELS[ASKED])
        queries = torch.from_numpy(PIXELS[ASKED])
        others: list[tuple[Any, ...]] = [(inputs, labels), (pairs,), (loader,)]
        for given in others:
            other = LocalMemory(of, batch_size=50).fit(*given)
            for queried in (queries, DataLoader(TensorDataset(queries), batch_size=50)):
                np.testing.assert_array_equal(other.predict_proba(queried), expected)


def test_neighbours_explain_a_prediction() -> None:
    memory = LocalMemory(num_neighbors=2, store={"capacity": 3, "policy": "fifo"})
    memory.fit([[0.0], [1.0], [2.5]], ["a", "b", "b"], names=["zero", "one", None])
    neighbors = memory.neighbors([[1.5], [0.0]])
    assert neighbors.indices.tolist() == [[1, 2], [0, 1]]
    assert neighbors.names.tolist() == [["one", None], ["zero", "one"]]
    assert neighbors.labels.tolist() == [["b", "b"], ["a", "b"]]
    assert neighbors.distances.tolist() == [[0.5, 1.0], [0.0, 1.0]]
    # exp(-d) of distances 0.5 and 1, and of 0 and 1; rows sum to 1.
    expected = [[1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(0.5))]]
    expected += [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]]
    np.testing.assert_allclose(neighbors.weights, expected)
    np.testing.assert_allclose(memory.predict_proba([[0.0]]), expected[1:], atol=1e-6)

    # The policy makes room; numbers go on from those of `fit`.
    memory.partial_fit([[0.5]], ["a"], names=["half"])
    assert memory.neighbors([[0.0]]).names.tolist() == [["half", "one"]]
    assert memory.neighbors([[0.0]]).indices.tolist() == [[3, 1]]
    assert memory.forget(names=["one", "half"]).tolist() == [1, 3]
    assert memory.neighbors([[0.0]]).indices.tolist() == [[2]]


def test_it_forgets_by_label_by_time_and_by_index() -> None:
    memory = LocalMemory().fit([[0.0], [1.0], [2.0], [3.0]], ["a", "b", "b", "c"])
    assert memory.forget(labels=["b"]).tolist() == [1, 2]
    assert memory.forget(indices=[0], before=10.0).tolist() == []
    assert memory.forget(indices=[3]).tolist() == [3]
    with pytest.raises(ValueError, match="found nothing"):
        memory.forget()
    with pytest.raises(TypeError, match="seconds since 1970 or a datetime"):
        memory.forget(before="2020")  # type: ignore[arg-type]
    memory.forget(indices=[0])
    assert memory.predict_proba([[0.0]]).tolist() == [pytest.approx([1 / 3] * 3)]


def test_lambda_follows_a_drift_when_it_is_tuned(model: Net) -> None:
    start, rest = slice(0, 20), slice(20, 400)
    says = model_says(model, PIXELS[start])
    memory = LocalMemory(model).fit(PIXELS[start], says)
    assert memory.knn_weight_ == 0
    memory.partial_fit(PIXELS[rest], LABELS[rest])
    assert memory.knn_weight_ == 0
    before = memory.score(PIXELS[ASKED], LABELS[ASKED])
    assert memory.tune().knn_weight_ > 0
    assert memory.score(PIXELS[ASKED], LABELS[ASKED]) > before + 0.5


def test_what_becomes_of_the_model_later_changes_nothing(model: Net) -> None:
    mine = copy.deepcopy(model)
    memory = LocalMemory(mine).fit(PIXELS[TRAIN], LABELS[TRAIN])
    expected = memory.predict_proba(PIXELS[ASKED])
    with torch.no_grad():
        mine.features.weight.zero_()
    assert mine.training, "the model is left as it was"
    np.testing.assert_array_equal(memory.predict_proba(PIXELS[ASKED]), expected)


@pytest.mark.parametrize("with_model", [False, True])
def test_a_memory_on_disk_is_the_same_and_keeps_what_it_learns(
    model: Net, tmp_path: Path, with_model: bool
) -> None:
    mine, folder = (model if with_model else None), tmp_path / "memory"
    words = np.array(["nought", *"abcdefghi"])
    memory = LocalMemory(
        mine, classes=words, num_neighbors=5, tuning={"criterion": "both"}
    )
    memory.fit(PIXELS[TRAIN], words[LABELS[TRAIN]])
    memory.save(folder)
    expected = memory.predict_proba(PIXELS[ASKED])

    with LocalMemory.load(folder, copy.deepcopy(mine)) as opened:
        np.testing.assert_array_equal(opened.predict_proba(PIXELS[ASKED]), expected)
        np.testing.assert_array_equal(opened.classes_, words)
        assert opened.knn_weight_ == memory.knn_weight_
        assert opened.get_params()["num_neighbors"] == 5
        with pytest.raises(StoreBusyError):
            LocalMemory.load(folder, mine)
        opened.partial_fit(
            PIXELS[ASKED], words[LABELS[ASKED]], names=[*map(str, range(200))]
        )
        opened.forget(names=["3"])
        opened.tune()
        expected = opened.predict_proba(PIXELS[ASKED])
        weight = opened.knn_weight_
        copied = copy.deepcopy(opened)
    np.testing.assert_array_equal(copied.predict_proba(PIXELS[ASKED]), expected)
    with LocalMemory.load(folder, mine) as again:
        assert len(again.store_) == 300 + 200 - 1
        assert again.knn_weight_ == weight
        np.testing.assert_array_equal(again.predict_proba(PIXELS[ASKED]), expected)
    with pytest.raises(StoreError, match="not empty"):
        memory.save(folder)


def test_problem_of_a_folder_is_reported(model: Net, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"memory\.json is missing"):
        LocalMemory.load(tmp_path)
    LocalMemory(model).fit(PIXELS[TRAIN], LABELS[TRAIN]).save(tmp_path / "memory")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.classifier.bias.add_(1)
    for wrong in (other, None):
        with pytest.raises(StoreMismatchError, match="was embedded by the model"):
            LocalMemory.load(tmp_path / "memory", wrong)
    (tmp_path / "memory" / "memory.json").write_text("{}")
    with pytest.raises(RunError, match=r"memory\.json is damaged"):
        LocalMemory.load(tmp_path / "memory", model)


def test_all_wrong_parameters_are_reported_together() -> None:
    wrong = LocalMemory(
        num_neighbors=0,
        kernel="gauss",  # type: ignore[arg-type]
        store={"capcity": 5},
        batch_size=0,
    )
    with pytest.raises(ConfigError) as caught:
        wrong.fit(PIXELS[TRAIN], LABELS[TRAIN])
    places = {problem.place for problem in caught.value.problems}
    assert places == {"num_neighbors", "kernel", "store.capcity", "batch_size"}
    headless = nn.Sequential(nn.Linear(64, 10), nn.Softmax(dim=1))
    with pytest.raises(OwnCodeError, match=r"no softmax .* write an Emb"):
        LocalMemory(headless).fit(PIXELS[TRAIN], LABELS[TRAIN])
    with pytest.raises(ConfigError, match="found a str, expected a torch"):
        LocalMemory("net").fit(PIXELS[TRAIN], LABELS[TRAIN])  # type: ignore[arg-type]


def test_labels_and_data_that_do_not_fit_are_refused(model: Net) -> None:
    inputs, labels = PIXELS[TRAIN], LABELS[TRAIN]
    pairs = TensorDataset(torch.from_numpy(inputs), torch.from_numpy(labels))
    with pytest.raises(ValueError, match="found the label 'a', expected one of"):
        LocalMemory(model).fit(inputs, ["a"] * len(inputs))
    with pytest.raises(
        ValueError, match="found 2, expected one for each of the model's 10"
    ):
        LocalMemory(model, classes=["a", "b"]).fit(inputs, labels)
    with pytest.raises(ValueError, match="expected each label once"):
        LocalMemory(classes=[0, 0]).fit(inputs, labels)
    with pytest.raises(ValueError, match="expected a label for each input"):
        LocalMemory(model).fit(inputs)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        LocalMemory(model).fit(inputs, labels[1:])
    with pytest.raises(ValueError, match="in the data set and as y"):
        LocalMemory(model).fit(pairs, labels)
    with pytest.raises(ValueError, match="NaN"):
        LocalMemory(model).fit(inputs * np.nan, labels)
    with pytest.raises(ValueError, match="expected finite numbers"):
        LocalMemory(model).fit(torch.from_numpy(inputs * np.nan), labels)
    diverged = copy.deepcopy(model)
    with torch.no_grad():
        diverged.features.weight.fill_(torch.inf)
    with pytest.raises(DataError, match="the model that embedded it has diverged"):
        LocalMemory(diverged).fit(inputs, labels)
    memory = LocalMemory().fit(inputs, labels)
    with pytest.raises(ValueError, match="found the label 77"):
        memory.partial_fit(inputs[:1], [77])
    with pytest.raises(DataError, match="found 'a' twice"):
        LocalMemory().fit(inputs, labels, names=["a"] * len(inputs))


class Typed(nn.Module):
    """A network of another type than float32, which does not convert its inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 16), nn.Linear(16, 10)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [np.float32, np.float64])
def test_model_of_another_type_gets_inputs_of_its_type(
    dtype: torch.dtype, given: type[np.floating[Any]]
) -> None:
    network, pixels = Typed(dtype), PIXELS[TRAIN].astype(given)
    memory = LocalMemory(network, knn_weights=[0]).fit(pixels, LABELS[TRAIN])
    with torch.no_grad():
        expected = torch.softmax(network(torch.from_numpy(pixels).to(dtype)).float(), 1)
    np.testing.assert_allclose(memory.predict_proba(pixels), expected, atol=2e-2)


class Viewing(nn.Module):
    """A network for images in torch's default memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 3, 1), nn.Linear(3 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x).view(len(x), -1))  # type: ignore[no-any-return]


def test_network_that_needs_contiguous_images_gets_them() -> None:
    network = Viewing()
    images = torch.from_numpy(PIXELS[TRAIN]).view(-1, 2, 8, 4)
    last = images.contiguous(memory_format=torch.channels_last)
    expected = LocalMemory(network).fit(images, LABELS[TRAIN]).predict_proba(images)
    memory = LocalMemory(network).fit(last, LABELS[TRAIN])
    np.testing.assert_array_equal(memory.predict_proba(last), expected)


class Drifting(Net):
    """A network with a statistic that each prediction moves."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))

    def representation(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().representation(x - self.mean)


def test_models_that_a_memory_cannot_rely_on_are_refused() -> None:
    with pytest.raises(OwnCodeError, match="the model changes mean in evaluation mode"):
        LocalMemory(Drifting()).fit(PIXELS[TRAIN], LABELS[TRAIN])

    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("links", torch.eye(3).to_sparse())

    class WithExtraState(Net):
        def get_extra_state(self) -> list[int]:
            return [1]

        def set_extra_state(self, state: object) -> None: ...

    for name, network in (("links", Sparse()), ("_extra_state", WithExtraState())):
        with pytest.raises(ConfigError, match=f"found '{name}', which is no plain"):
            LocalMemory(network).fit(PIXELS[TRAIN], LABELS[TRAIN])


def test_the_first_part_may_lack_classes_that_are_named() -> None:
    memory = LocalMemory().partial_fit([[0.0]], ["a"], classes=["a", "b"])
    memory.partial_fit([[9.0]], ["b"])
    assert memory.predict([[1.0], [8.0]]).tolist() == ["a", "b"]


def test_a_parameter_counts_from_the_next_fit_on() -> None:
    memory = LocalMemory().fit(PIXELS[TRAIN], LABELS[TRAIN])
    expected = memory.predict_proba(PIXELS[ASKED])
    memory.set_params(kernel="squared", num_neighbors=3)
    np.testing.assert_array_equal(memory.predict_proba(PIXELS[ASKED]), expected)
    memory.fit(PIXELS[TRAIN], LABELS[TRAIN])
    assert (memory.predict_proba(PIXELS[ASKED]) != expected).any()


def test_a_grid_search_takes_it() -> None:
    search = GridSearchCV(LocalMemory(), {"num_neighbors": np.arange(1, 4)}, cv=3)
    search.fit(PIXELS[TRAIN], LABELS[TRAIN])
    assert search.best_score_ > 0.85


IMPORTS = """
import sys
import numpy as np
from knnper import LocalMemory
LocalMemory().fit(np.eye(4), [0, 1, 0, 1]).predict(np.eye(4))
print(sorted({"flwr", "ray", "knnper.strategies"} & set(sys.modules)))
"""


def test_it_needs_neither_flower_nor_ray(tmp_path: Path) -> None:
    assert run_fresh(IMPORTS, tmp_path).stdout == "[]\n"
