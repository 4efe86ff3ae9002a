"""`LocalMemory`: a client's memory as a scikit-learn classifier.

It uses the store, the choice of λ, k and σ and the predictor of kNN-Per. This file adds
scikit-learn's interface, the embedding of inputs by a user's model, and files.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from knnper.datastore.class_prior import ClassPriorSettings, require_class_shares
from knnper.datastore.examples import NewExamples, Selection, StoreSpec
from knnper.datastore.memory import PAPER_KNN_WEIGHTS, KnnSettings, TuningSettings
from knnper.datastore.memory_inputs import (
    as_array,
    as_labels,
    as_tensor,
    batches_of,
    coarse_columns,
    listed_names,
    loader_of,
    middle_values,
    require_numbers,
    require_predictable,
    require_stored_order,
    with_column_names,
)
from knnper.datastore.memory_model import copy_model, fingerprint_model
from knnper.datastore.policy import StoreSettings
from knnper.datastore.prediction import (
    KernelName,
    KnnParameters,
    KnnPredictor,
    Prediction,
    build_predictor,
)
from knnper.datastore.store import (
    Store,
    empty_memory_store,
    new_folder,
    open_store,
    restored_store,
    write_store,
)
from knnper.datastore.tuning import (
    choose_parameters,
    evenly_spread,
    fill_and_tune,
    is_fixed,
    left_out_evidence,
    no_evidence,
    parameter_grid,
)
from knnper.embedding_model import EmbeddingModel, laid_out
from knnper.errors import ConfigError, DataError, Problem
from knnper.files import read_document, require_plain, write_atomically
from knnper.settings import parse_settings
from knnper.split_network import split
from knnper.trial import require_constant_buffers

Inputs = ArrayLike | Tensor | Dataset[Any] | DataLoader[Any]
"""n inputs, or a data set or loader of inputs and labels, as pairs or as mappings."""
MOST_LEFT_OUT = 2000
"""The most examples scored by leave-one-out; each is compared with all others."""
STORE, DESCRIPTION = "store", "memory.json"  # in the folder of a memory
_SETTINGS = [setting.name for setting in fields(KnnSettings)]
_RARE_DTYPES = (torch.uint16, torch.uint32, torch.uint64, torch.bfloat16)
"""Types of tensors that few operations support, or that NumPy lacks."""
_NO_LABELS = (
    "y: found none, expected a label for each input; give them as y, or a data set of "
    "inputs and labels"
)
_NO_HEAD = (
    "; or give its outputs to a memory without a model, or write an EmbeddingModel"
)


@dataclass(frozen=True, eq=False)
class NeighborTable:
    """The k' nearest stored examples of n inputs, nearest first.

    Attributes
    ----------
    indices
        Numbers of the examples, int64 of shape (n, k'). Examples are numbered from 0 in
        the order in which they were added: ``X`` of `LocalMemory.fit`, its ``X_val``,
        then the inputs of each `LocalMemory.partial_fit`.
    names
        Their names, object array of shape (n, k'); None for an unnamed example.
    labels
        Shape (n, k'), as in ``classes_``.
    distances
        Euclidean distances of the representations, float64 of shape (n, k').
    weights
        Each neighbour's share of p_kNN, float64 of shape (n, k'); rows sum to 1.
    """

    indices: NDArray[np.int64]
    names: NDArray[np.object_]
    labels: NDArray[Any]
    distances: NDArray[np.float64]
    weights: NDArray[np.float64]


@dataclass(frozen=True)
class _Saved:
    """The description of a memory in its folder, beside the store."""

    settings: KnnSettings
    choice: KnnParameters
    classes: tuple[bool | int | float | str, ...]
    dtype: str  # of ``classes_``
    batch_size: int
    num_features: int | None  # of an input; None with a model
    feature_names: tuple[str, ...] | None = None  # None if `fit` got no names
    origin: tuple[float, ...] | None = None  # see `LocalMemory._as_rows`
    format: int = 1


class LocalMemory(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that mixes a model with the vote of the nearest stored examples.

    It predicts λ p_kNN + (1 - λ) p_model (Marfoq et al. 2022, Eq. 7), with λ chosen for
    its data. It follows scikit-learn: `fit`, `predict`, `predict_proba`, `score`,
    `get_params`, `clone`, pipelines and grid searches.

    Inputs are arrays, tables, tensors, a data set (of torch or Hugging Face) or a
    ``DataLoader``. The last two contain the labels, so omit ``y``. Their batches are
    pairs of inputs and labels, or mappings such as ``{"img": ..., "label": ...}``.
    Arguments that are matched to inputs by position, such as names, need a loader that
    does not shuffle, and so does `predict`. Columns of tables must have the same names
    and order as in `fit`.

    Without a model, columns that float32 cannot resolve, such as times since 1970, are
    stored relative to one of their values, which leaves distances unchanged.

    Parameters
    ----------
    model
        A classifier from inputs to logits (n, c): any ``torch.nn.Module`` that ends
        with a linear layer, or an `EmbeddingModel`. The input of the last layer is the
        representation. `fit` copies the model, so that later training does not change
        the memory. None uses the inputs as representation and the neighbours alone for
        prediction (λ = 1).
    classes
        The labels in the order of the model's outputs. None is 0 to c - 1 with a model,
        and the labels in the data without one.
    num_neighbors, kernel, kernel_scale, knn_weights
        k, the kernel, σ, and the λ to choose from; see `KnnSettings`.
    tuning, class_prior, store
        `TuningSettings`, `ClassPriorSettings` and `StoreSettings`, or mappings of
        their fields, as in ``store={"capacity": 5000, "policy": "reservoir"}``. Unlike
        in `TuningSettings`, the default of ``tuning.evidence`` is ``auto``:
        leave-one-out with fewer than 50 validation examples.
    batch_size
        Number of inputs that the model embeds at once.

    Attributes
    ----------
    classes_
        The labels, shape (c,); columns of `predict_proba`.
    knn_weight_, num_neighbors_, kernel_scale_
        The chosen λ, k and σ.
    store_
        The `Store` with the examples.
    n_features_in_
        Length of an input; without a model only.
    feature_names_in_
        Names of the columns, if `fit` got a table.

    Raises
    ------
    ConfigError
        From `fit`, if parameters are wrong; it lists all problems.
    OwnCodeError
        If the model does not end with a linear layer.
    ValueError
        If data does not fit: wrong shapes, unknown labels, NaN.
    DataError
        If the model's representation is not finite, or a name is already used.
    """

    classes_: NDArray[Any]
    store_: Store
    model_: nn.Module | None  # the copy; an `EmbeddingModel` after its first pass
    _origin: NDArray[np.float64] | None = None  # shape (p,), see `_as_rows`; None is 0
    _fitted: KnnSettings  # the parameters at the last `fit` or `tune`
    _choice: KnnParameters
    _folder: Path | None  # opened by `load`

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        classes: ArrayLike | None = None,
        num_neighbors: int = 10,
        kernel: KernelName = "paper",
        kernel_scale: float = 1.0,
        knn_weights: Sequence[float] = PAPER_KNN_WEIGHTS,
        tuning: TuningSettings | Mapping[str, Any] | None = None,
        class_prior: ClassPriorSettings | Mapping[str, Any] | None = None,
        store: StoreSettings | Mapping[str, Any] | None = None,
        batch_size: int = 256,
    ) -> None:
        self.model, self.classes = model, classes
        self.num_neighbors, self.kernel = num_neighbors, kernel
        self.kernel_scale, self.knn_weights = kernel_scale, knn_weights
        self.tuning, self.class_prior, self.store = tuning, class_prior, store
        self.batch_size = batch_size

    def fit(
        self,
        X: Inputs,
        y: ArrayLike | Tensor | None = None,
        X_val: Inputs | None = None,
        y_val: ArrayLike | Tensor | None = None,
        *,
        names: Sequence[str | None] | None = None,
        names_val: Sequence[str | None] | None = None,
    ) -> Self:
        """Store examples in an empty memory, and choose λ, k and σ.

        At least 50 validation examples (``tuning.min_validation``) are scored with only
        the other examples in the memory, and then stored as well. With fewer, or none,
        leave-one-out scores every example of both with all others in the memory. For a
        model that was trained on ``X``, leave-one-out overestimates the model: pass
        enough validation examples, or ``tuning={"evidence": "validation"}``.

        Parameters
        ----------
        X, X_val
            Inputs of the model, or (n, p) without a model.
        y, y_val
            Labels, shape (n,); of any type without a model.
        names, names_val
            Your own unique names of the examples, to find and forget them.
        """
        return self._fit(X, y, names, X_val, y_val, names_val)

    def partial_fit(
        self,
        X: Inputs,
        y: ArrayLike | Tensor | None = None,
        classes: ArrayLike | None = None,
        *,
        names: Sequence[str | None] | None = None,
    ) -> Self:
        """Store more examples; the first call is a `fit`.

        λ does not change until `tune`; call it when a small memory has grown. The
        store's policy decides which examples leave a full memory. ``classes`` lists all
        possible labels, if the first call does not contain all.
        """
        if not hasattr(self, "store_"):
            return self._fit(X, y, names, classes=classes)
        embeddings, labels = self._represent(X, y, names, is_first=False)
        self.store_.add(self._examples(embeddings, labels, names))
        return self

    def tune(self) -> Self:
        """Choose λ, k and σ again, by leave-one-out on the stored examples."""
        check_is_fitted(self)
        settings, store = self._settings(), self.store_
        evidence = no_evidence(len(self.classes_))
        if not is_fixed(settings):
            positions = evenly_spread(len(store), MOST_LEFT_OUT)
            most = max(parameter_grid(settings).num_neighbors)
            prior = settings.class_prior
            evidence = left_out_evidence(store, positions, self._head, most, prior)
        self._fitted = settings
        self._choice = choose_parameters(evidence, len(store), settings)
        if self._folder is not None:
            self._describe(self._folder)
        return self

    def predict(self, X: Inputs) -> NDArray[Any]:
        """Return the most probable label of each input, shape (n,)."""
        probabilities = self.predict_proba(X)
        labels: NDArray[Any] = self.classes_[probabilities.argmax(axis=1)]
        return labels

    def predict_proba(self, X: Inputs) -> NDArray[np.float32]:
        """Return λ p_kNN + (1 - λ) p_model, float32 of shape (n, c)."""
        check_is_fitted(self)
        return self._predictor()(self._queried(X)).numpy()

    def score(
        self,
        X: Inputs,
        y: ArrayLike | Tensor | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> float:
        """Return the accuracy on inputs and their labels.

        A data set or loader contains the labels, so omit ``y``. A loader may shuffle,
        except with ``y`` or ``sample_weight``.
        """
        check_is_fitted(self)
        require_stored_order(X, y=y, sample_weight=sample_weight)
        inputs, own_labels = self._read(X)
        labels = self._one_source(own_labels, y)
        if labels is None:
            raise ValueError(_NO_LABELS)
        probabilities = self._predictor()(self._checked_queries(inputs)).numpy()
        predicted = self.classes_[probabilities.argmax(axis=1)]
        score: float = accuracy_score(labels, predicted, sample_weight=sample_weight)
        return score

    def neighbors(self, X: Inputs) -> NeighborTable:
        """Return the stored examples that vote on each prediction."""
        check_is_fitted(self)
        vote = self.explain(X).vote
        neighbors = vote.neighbors
        shape = tuple(neighbors.ids.shape)
        names = np.array(
            [name for row in neighbors.names for name in row], dtype=object
        )
        return NeighborTable(
            neighbors.ids.numpy() - 1,
            names.reshape(shape),
            self.classes_[neighbors.labels.numpy()],
            neighbors.squared_distances.sqrt().numpy(),
            vote.weights.numpy(),
        )

    def explain(self, X: Inputs) -> Prediction:
        """Return p_model, p_kNN, λ, their mixture and the neighbours."""
        check_is_fitted(self)
        return self._predictor(with_names=True).explain(self._queried(X))

    def forget(
        self,
        *,
        indices: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        labels: Sequence[Any] | None = None,
        before: datetime | float | None = None,
    ) -> NDArray[np.int64]:
        """Delete the examples that match all arguments; return their indices.

        No trace of them is left, neither in memory nor in a folder opened by `load`. λ
        does not change until `tune`. ``before`` is a time of arrival, in seconds since
        1970 or as a ``datetime``.
        """
        check_is_fitted(self)
        if not isinstance(before, datetime | Real | None):
            raise TypeError(
                f"before: expected seconds since 1970 or a datetime, found {before!r}"
            )
        chosen = Selection(
            ids=None if indices is None else tuple(index(row) + 1 for row in indices),
            external_ids=None if names is None else _known_names(names),
            labels=None if labels is None else self._encoded(_as_column(labels)),
            arrived_before=before.timestamp()
            if isinstance(before, datetime)
            else before,
        )
        if chosen == Selection():
            raise ValueError(
                "expected indices, names, labels or a time, found nothing; to forget "
                "everything, call fit"
            )
        return self.store_.delete(chosen) - 1

    def save(self, path: str | Path) -> None:
        """Write the memory, without the model's weights, to a new folder atomically.

        The commands ``knnper store`` work on the store in it.

        Raises
        ------
        StoreError
            If the folder is not empty.
        """
        check_is_fitted(self)
        with new_folder(Path(path)) as draft:
            write_store(draft / STORE, self.store_.serialized())
            self._describe(draft)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> Self:
        """Open the memory in a folder; each later change is on disk at once.

        Only one process can open it at a time; `close` releases it. ``model`` must be
        the model with which it was saved.

        Raises
        ------
        DataError
            If the folder contains no memory.
        StoreMismatchError
            If it was saved with another model.
        StoreBusyError
            If another process has opened it.
        """
        folder = Path(path)
        require_plain(folder)
        advice = "save the memory again, or bring the folder back from a backup"
        saved = read_document(_Saved, folder / DESCRIPTION, advice)
        if saved is None:
            raise DataError(
                f"{folder} holds no memory: {DESCRIPTION} is missing. Give the folder "
                "that LocalMemory.save wrote"
            )
        settings, classes = saved.settings, np.array(saved.classes, saved.dtype)
        memory = cls(
            model,
            classes=classes,
            batch_size=saved.batch_size,
            **{name: getattr(settings, name) for name in _SETTINGS},
        )
        memory.model_ = copy_model(model)
        fingerprint = fingerprint_model(memory.model_)
        memory.store_ = open_store(
            folder / STORE, writable=True, fingerprint=fingerprint
        )
        memory.classes_, memory._folder = classes, folder
        memory._fitted, memory._choice = settings, saved.choice
        if saved.num_features is not None:
            memory.n_features_in_ = saved.num_features
        if saved.feature_names is not None:
            memory.feature_names_in_ = np.array(saved.feature_names, dtype=object)
        origin = saved.origin
        memory._origin = None if origin is None else np.array(origin, np.float64)
        return memory

    def close(self) -> None:
        """Release the folder for other processes; the memory is unusable afterwards."""
        if hasattr(self, "store_"):
            self.store_.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        if "store_" in state:
            # The copy is in memory, and the folder stays with the original.
            state |= {"store_": state["store_"].serialized(), "_folder": None}
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self, "store_"):
            self.store_ = restored_store(state["store_"])

    @property
    def knn_weight_(self) -> float:
        """The neighbours' share of a prediction, λ."""
        return self._choice.knn_weight

    @property
    def num_neighbors_(self) -> int:
        """The number of neighbours, k."""
        return self._choice.num_neighbors

    @property
    def kernel_scale_(self) -> float:
        """The kernel's scale, σ."""
        return self._choice.kernel_scale

    def _fit(
        self,
        X: Inputs,
        y: ArrayLike | Tensor | None,
        names: Sequence[str | None] | None,
        X_val: Inputs | None = None,
        y_val: ArrayLike | Tensor | None = None,
        names_val: Sequence[str | None] | None = None,
        classes: ArrayLike | None = None,
    ) -> Self:
        settings = self._settings()
        self.model_ = copy_model(self.model)
        fingerprint = fingerprint_model(self.model_)
        embeddings, labels = self._represent(X, y, names, is_first=True)
        embeddings_val, labels_val = torch.empty((0, embeddings.shape[1])), np.empty(0)
        if X_val is not None:
            embeddings_val, labels_val = self._represent(
                X_val, y_val, names_val, is_first=False
            )
        known = self._known_classes(classes, embeddings, labels, labels_val)
        require_class_shares(settings.class_prior, len(known))
        self.classes_ = known
        store = empty_memory_store(
            StoreSpec(len(known)),
            int(embeddings.shape[1]),
            fingerprint,
            settings.store,
        )
        tuned = fill_and_tune(
            store,
            self._examples(embeddings, labels, names),
            self._examples(embeddings_val, labels_val, names_val),
            self._head,
            settings,
            MOST_LEFT_OUT,
        )
        self.close()
        self.store_ = store
        self._fitted, self._choice, self._folder = settings, tuned.choice, None
        return self

    def _settings(self) -> KnnSettings:
        """Validate the parameters; raise ConfigError with all problems."""
        parameters = {name: getattr(self, name) for name in _SETTINGS}
        plain = to_jsonable_python(
            {name: value for name, value in parameters.items() if value is not None},
            fallback=lambda value: (
                value.tolist() if hasattr(value, "tolist") else repr(value)
            ),
        )
        if isinstance(plain.get("tuning", {}), dict):
            plain["tuning"] = {"evidence": "auto", **plain.get("tuning", {})}
        problems = list[Problem]()
        settings = parse_settings(KnnSettings, plain, "", problems)
        size = self.batch_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            wrong = f"found {size!r}, expected a whole number of at least 1"
            problems.append(Problem("batch_size", wrong))
        if settings is None or problems:
            raise ConfigError(problems, "LocalMemory")
        weights = (1.0,) if self.model is None else settings.knn_weights
        return replace(settings, knn_weights=weights)

    def _known_classes(
        self,
        later: ArrayLike | None,
        embeddings: Tensor,
        *labels: NDArray[Any],
    ) -> NDArray[Any]:
        """Return ``classes_``, one for each output of the model if there is one."""
        listed = self.classes if self.classes is not None else later
        known = None if listed is None else column_or_1d(listed)
        if known is not None and len(set(known.tolist())) < len(known):
            raise ValueError(f"classes: expected each label once, found {known}")
        if self.model_ is None:
            labels_found = unique_labels(
                *(split_labels for split_labels in labels if len(split_labels))
            )
            return np.asarray(labels_found if known is None else known)
        num_classes = self._logits(embeddings[:1]).shape[1]
        if known is None:
            known = np.arange(num_classes)
        if len(known) != num_classes:
            raise ValueError(
                f"classes: found {len(known)}, expected one for each of the model's "
                f"{num_classes} outputs"
            )
        return np.asarray(known)

    def _examples(
        self,
        embeddings: Tensor,
        labels: NDArray[Any],
        names: Sequence[str | None] | None,
    ) -> NewExamples:
        known = torch.tensor(self._encoded(labels), dtype=torch.int64)
        named = None if names is None else listed_names(names)
        return NewExamples(embeddings, known, None, named)

    def _encoded(self, labels: NDArray[Any]) -> tuple[int, ...]:
        """Return the positions of labels in ``classes_``."""
        place_of = {label: place for place, label in enumerate(self.classes_.tolist())}
        unknown = next(
            (label for label in labels.tolist() if label not in place_of), None
        )
        if unknown is not None:
            raise ValueError(
                f"found the label {unknown!r}, expected one of {list(place_of)}; give "
                "all possible labels, in the order of the model's outputs, as `classes`"
            )
        return tuple(place_of[label] for label in labels.tolist())

    def _represent(
        self,
        X: Inputs,
        y: ArrayLike | Tensor | None,
        names: Sequence[str | None] | None,
        *,
        is_first: bool,
    ) -> tuple[Tensor, NDArray[Any]]:
        """Return the representations (n, p) of examples, and their labels (n,)."""
        require_stored_order(X, y=y, names=names)
        inputs, own_labels = self._read(X, is_first=is_first)
        labels = self._one_source(own_labels, y)
        if self.model_ is None:
            inputs, labels = validate_data(self, inputs, labels, reset=is_first)
            inputs = self._as_rows(inputs, is_first=is_first)
        elif labels is None:
            raise ValueError(_NO_LABELS)
        labels = column_or_1d(labels)
        check_classification_targets(labels)
        check_consistent_length(inputs, labels)
        return inputs, labels

    def _one_source(self, own_labels: Any, y: ArrayLike | Tensor | None) -> Any:
        """Return the labels of the data set or the argument y, or None."""
        if own_labels is not None and y is not None:
            raise ValueError(
                "found labels in the data set and as y, expected one of the two"
            )
        labels = own_labels if y is None else y
        return None if labels is None else as_labels(labels)

    def _read(self, X: Inputs, *, is_first: bool = False) -> tuple[Any, Any]:
        """Return representations, and the labels of a data set or loader, or None.

        Without a model, inputs are returned unchanged.
        """
        loader = loader_of(X, self.batch_size)
        if loader is None:
            X = with_column_names(X)
            if self.model_ is not None:
                # Checks the names of columns only.
                validate_data(
                    self, X, reset=is_first, skip_check_array=True, ensure_2d=False
                )
            return self._embedded(X), None
        inputs, labels = list[Any](), list[Any]()
        for batch_inputs, batch_labels in batches_of(loader):
            inputs.append(self._embedded(batch_inputs))
            if batch_labels is not None:
                labels.append(as_array(batch_labels, "y"))
        if not inputs:
            raise ValueError("found no examples in the data set, expected at least one")
        joined = np.concatenate(inputs) if self.model_ is None else torch.cat(inputs)
        return joined, np.concatenate(labels) if labels else None

    def _embedded(self, inputs: Any) -> Any:
        """Return φ(x) of inputs, float32 (n, p); unchanged inputs without a model."""
        if self.model_ is None:
            return as_array(inputs)
        tensor = self._as_input(inputs)
        if not isinstance(self.model_, EmbeddingModel):
            sample = torch.cat([tensor[:1], tensor[:1]]).to(self._device)
            self.model_ = split(self.model_, sample, fix=_NO_HEAD).eval()
            sample = laid_out(sample, self.model_.memory_format)
            require_constant_buffers(self.model_, sample, sample, "the model")
        embed, memory_format = self.model_.embed, self.model_.memory_format
        try:
            return self._in_batches(
                tensor, lambda part: embed(laid_out(part, memory_format))
            )
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ValueError(
                f"X: the model failed on inputs {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}; give them as in fit: {error}"
            ) from error

    def _as_input(self, inputs: Any) -> Tensor:
        """Convert inputs to dense tensors, real numbers in the model's precision."""
        is_table = hasattr(inputs, "columns")
        if not isinstance(inputs, Tensor) or inputs.dtype in _RARE_DTYPES:
            inputs = as_tensor(
                check_array(
                    as_array(inputs), dtype="numeric", allow_nd=True, ensure_2d=False
                )
            )
        tensor: Tensor = inputs.detach()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.contiguous()  # the layout affects the last bits of products
        is_numbers = is_table or tensor.dtype == torch.bool
        if not is_numbers and not tensor.is_floating_point():
            return tensor  # integers, such as token ids of text
        if tensor.dim() < 2:
            raise ValueError(
                f"X: found shape {tuple(tensor.shape)}, expected (n, ...); of a single "
                "input x, give x[None]"
            )
        tensor = tensor.to(self._dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                "X: found NaN, infinity or a number too large for the model's "
                f"{tensor.dtype}, expected finite numbers"
            )
        return tensor

    def _as_rows(self, inputs: NDArray[Any], *, is_first: bool) -> Tensor:
        """Convert inputs (n, p) of a memory without a model to rows of float32.

        Columns with values that float32 cannot distinguish are stored relative to an
        origin. `fit` selects these columns and their origins; later calls keep them,
        because their inputs may be too few to measure how much a column varies.
        """
        if not is_first:
            return as_tensor(self._rounded(inputs))
        self._origin = None
        rows = self._rounded(inputs)
        coarse = coarse_columns(inputs, rows)
        if coarse.any():
            self._origin = np.where(coarse, middle_values(inputs), 0.0)
            rows = self._rounded(inputs)
            coarse = coarse_columns(inputs - self._origin, rows)
        if coarse.any():
            known = getattr(self, "feature_names_in_", np.arange(len(coarse)))
            columns = ", ".join(map(str, known[coarse]))
            warnings.warn(
                f"X: values of the columns {columns} differ by less than float32 can "
                "resolve at their size, so distances are wrong; subtract an offset, or "
                "scale them, as StandardScaler does",
                stacklevel=2,
            )
        return as_tensor(rows)

    def _rounded(self, inputs: NDArray[Any]) -> NDArray[np.float32]:
        """Convert inputs (n, p) to float32, relative to the origin."""
        require_numbers(inputs)
        if self._origin is not None:
            inputs = inputs.astype(np.float64, copy=False) - self._origin
        with np.errstate(over="ignore", under="ignore"):
            rows = inputs.astype(np.float32, copy=False)
        if not np.isfinite(rows).all():
            raise ValueError("X: found a number too large for float32; scale them")
        return rows

    def _in_batches(self, inputs: Tensor, function: Callable[[Tensor], Tensor]) -> Any:
        with torch.inference_mode():
            split_up = torch.split(inputs, self.batch_size)
            parts = [function(part.to(self._device)) for part in split_up]
            return torch.cat(parts).float().cpu().clone()

    @property
    def _device(self) -> torch.device:
        assert self.model_ is not None, "called with a model only"
        first = next(self.model_.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def _dtype(self) -> torch.dtype:
        """The floating-point type of the model's parameters."""
        assert self.model_ is not None, "called with a model only"
        dtypes = (parameter.dtype for parameter in self.model_.parameters())
        real = (dtype for dtype in dtypes if dtype.is_floating_point)
        return next(real, torch.float32)

    def _logits(self, embeddings: Tensor) -> Tensor:
        assert isinstance(self.model_, EmbeddingModel), "set by the first embedding"
        head = getattr(self.model_, "classifier", self.model_)
        inputs = _as_taken(embeddings, head)
        logits: Tensor = self._in_batches(inputs, self.model_.head)
        return logits

    def _head(self, embeddings: Tensor) -> Tensor:
        """Return p_model (n, c) of representations; uniform without a model."""
        if self.model_ is None:
            return torch.full(
                (len(embeddings), len(self.classes_)), 1 / len(self.classes_)
            )
        return torch.softmax(self._logits(embeddings), dim=1)

    def _predictor(self, *, with_names: bool = False) -> KnnPredictor:
        """Build the predictor that evaluation and service use too."""
        return build_predictor(
            embed=lambda representations: representations,  # queries are embedded
            head=self._head,
            store=self.store_,
            kernel=self._fitted.kernel,
            parameters=self._choice,
            with_names=with_names,
        )

    def _queried(self, X: Inputs) -> Tensor:
        """Return the representations (n, p) of inputs; their order must be known."""
        require_predictable(X)
        return self._checked_queries(self._read(X)[0])

    def _checked_queries(self, inputs: Any) -> Tensor:
        if self.model_ is not None:
            return inputs  # type: ignore[no-any-return]
        return as_tensor(self._rounded(validate_data(self, inputs, reset=False)))

    def _describe(self, folder: Path) -> None:
        """Write the description: everything except the store."""
        names = getattr(self, "feature_names_in_", None)
        saved = _Saved(
            self._fitted,
            self._choice,
            tuple(self.classes_.tolist()),
            self.classes_.dtype.str,
            self.batch_size,
            getattr(self, "n_features_in_", None),
            None if names is None else tuple(names),
            None if self._origin is None else tuple(self._origin.tolist()),
        )
        content = TypeAdapter(_Saved).dump_json(saved, indent=2)
        write_atomically(folder / DESCRIPTION, content)


def _known_names(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in listed_names(names) if name is not None)


def _as_column(labels: Sequence[Any]) -> NDArray[Any]:
    if isinstance(labels, str | bytes):
        raise ValueError(
            f"labels: found {labels!r}, expected a sequence of labels; put it into a "
            "list"
        )
    return np.asarray(labels)


def _as_taken(inputs: Tensor, module: nn.Module) -> Tensor:
    """Convert floating-point inputs to the type of a module's weights."""
    if not inputs.is_floating_point():
        return inputs
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return inputs.to(parameter.dtype)
    return inputs.float()
