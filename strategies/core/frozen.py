"""Training a head on embeddings that a frozen network computed once.

Where nothing but the head is trained, φ(x) is the same in every round. A client's
examples are then their embeddings, and the model is its head: every method trains it,
and every predictor runs it, without a pass through the network. What is exported and
served has the whole network again.
"""

import copy
import hashlib
import logging
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.progress import track
from torch import nn

from knnper.data.cache import RowFile, cached
from knnper.data.examples import Dataset, Examples, InputSpec
from knnper.embedding_model import EmbeddingModel, FlatModel
from knnper.experiment import Choice, Settings, plain
from knnper.files import UNFINISHED
from knnper.strategies.core.task import Task

log = logging.getLogger(__name__)


class Head(EmbeddingModel):
    """The head of a network alone, whose inputs are embeddings."""

    def __init__(self, network: EmbeddingModel) -> None:
        super().__init__()
        self.features = nn.Flatten()
        # Each has a vector of weights of its own.
        self.classifier = copy.deepcopy(network.classifier)
        self.embedding_dim = network.embedding_dim
        self.num_classes = network.num_classes
        self.criterion = network.criterion


def of_embeddings(task: Task) -> Task:
    """Return the task of training the head on embeddings, where φ is frozen.

    Its weights, (num_weights,), are those of ``task``. Inputs are float32 of shape (n,
    1, 1, p). Where it cannot be, it is ``task`` itself.
    """
    if not task.model.module.body_is_frozen:
        return task
    if task.training.augmentation != "none":
        log.warning(
            "the frozen network runs in every step, as images are changed at random: "
            "with training.augmentation none each would be embedded once"
        )
        return task
    network = task.model.module
    own = ("head", "losses", "position_losses")
    overrides = any(
        getattr(type(network), name) is not getattr(EmbeddingModel, name)
        for name in own
    )
    if overrides or not network.learns_from_embeddings:
        log.warning("the frozen network runs in every step, as its loss needs it to")
        return task
    spec = task.spec
    width = network.embedding_dim
    zeros, ones = (0.0,) * width, (1.0,) * width
    flat = FlatModel(Head(network), task.model.device)
    return replace(
        task,
        model=flat,
        normalize=lambda embeddings: embeddings.float().permute(0, 3, 1, 2),
        spec=InputSpec((1, 1, width), spec.num_classes, zeros, ones, "float32"),
    )


def embeddings_of(
    images: NDArray[Any], task: Task, model: Choice[Settings], root: Path | None = None
) -> NDArray[np.float32]:
    """Return φ(x) of stored inputs (n, h, w, ch), memory-mapped, shape (n, 1, 1, p).

    They are computed where the cache, or the folder ``root``, does not have them; what
    was computed before an interruption is not computed again. ``model`` is what
    ``task`` trains the head of.
    """
    left_out = ("weights", "frozen")  # where they are from, and what is told below
    chosen = {key: one for key, one in plain(model).items() if key not in left_out}
    source = {
        "inputs": _digest(images),
        "model": [chosen, model.fingerprint, task.model.frozen],
        "spec": to_jsonable_python(task.spec),
        "precision": task.training.precision,
        "batch": task.evaluation_batch_size,
        "threads": torch.get_num_threads(),
        "device": task.model.device.type,
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
    }

    def fill(folder: Path) -> None:
        parts = folder.with_name(f"{folder.name.removesuffix(UNFINISHED)}.parts")
        parts.mkdir(exist_ok=True)
        width = task.model.module.embedding_dim
        rows = RowFile(folder / _ROWS, (1, 1, width), np.dtype(np.float32))
        for part in _computed(images, task, parts):
            rows.append(part.reshape(-1, 1, 1, width))
        rows.finish()
        shutil.rmtree(parts)

    def read(folder: Path) -> NDArray[np.float32]:
        found: NDArray[np.float32] = np.load(folder / _ROWS, mmap_mode="r")
        if len(found) != len(images):
            raise ValueError(f"expected {len(images)} rows, found {len(found)}")
        return found

    if len(images) == 0:
        return np.zeros((0, 1, 1, task.model.module.embedding_dim), np.float32)
    return cached("embeddings", source, read, fill, root)


_ROWS = "rows.npy"
_BATCHES_AT_ONCE = 8


def _computed(
    images: NDArray[Any], task: Task, parts: Path
) -> Iterator[NDArray[np.float32]]:
    """Yield embeddings (m, p), which are kept in the folder ``parts`` meanwhile."""
    at_once = _BATCHES_AT_ONCE * task.evaluation_batch_size
    starts = range(0, len(images), at_once)
    shown = sys.stderr.isatty() and len(starts) > 1
    bar = track(starts, "embedding", console=Console(stderr=True), disable=not shown)
    for start in bar:
        file = parts / f"{start:09d}.npy"
        if not file.exists():
            some = torch.from_numpy(np.array(images[start : start + at_once]))
            found = task.embed(task.initial_weights, some).numpy()
            draft = file.with_suffix(".draft.npy")
            np.save(draft, found)
            draft.rename(file)
        yield np.load(file)


def _digest(images: NDArray[Any]) -> str:
    """Return a fingerprint of numbers, in parts: they may be more than memory."""
    digest = hashlib.sha256(f"{images.dtype} {images.shape}".encode())
    for start in range(0, len(images), _IMAGES_AT_ONCE):
        digest.update(
            np.ascontiguousarray(images[start : start + _IMAGES_AT_ONCE]).data
        )
    return digest.hexdigest()


_IMAGES_AT_ONCE = 4096


def embedded(
    dataset: Dataset, task: Task, model: Choice[Settings], spec: InputSpec
) -> Dataset:
    """Return a data set whose inputs are their embeddings; see `embeddings_of`."""
    train, test = (
        replace(split, images=embeddings_of(split.images, task, model))
        for split in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test, spec=spec)


def embedded_examples(
    examples: Examples, task: Task, model: Choice[Settings], root: Path
) -> Examples:
    """Return a site's examples as their embeddings; see `embeddings_of`."""
    found = embeddings_of(examples.images.numpy(), task, model, root)
    return Examples(torch.from_numpy(np.array(found)), examples.labels)
