"""Training on what the frozen first part of a network computed once.

Where a head alone is trained, or the last blocks, what goes into them is the same in
every round. A client's examples are then these activations, and the model is the rest
of the network: every method trains it, and every predictor runs it, without a pass
through the frozen part. What is exported and served has the whole network again.
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
from torch import Tensor, nn

from knnper.data.cache import cached
from knnper.data.examples import Dataset, Examples, InputSpec
from knnper.data.numpy_files import RowFile
from knnper.embedding_model import EmbeddingModel, FlatModel, seen_at
from knnper.files import UNFINISHED
from knnper.settings import Choice, Settings, plain
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
        self.memory_format = network.memory_format


def _behind(network: EmbeddingModel, shape: torch.Size) -> EmbeddingModel:
    """Return what a network has behind its frozen part.

    Its inputs are rows of q numbers, (n, q, 1, 1), each of which the frozen part
    returned in this shape.
    """
    if network.body_is_frozen:
        return Head(network)
    trained_part = copy.deepcopy(network)
    _pass_on_frozen(trained_part, trained_part.trained or frozenset())

    def shaped(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        # A copy: the first layer may work in place.
        return inputs[0].reshape(-1, *shape).clone()

    trained_part.features.register_forward_pre_hook(shaped)
    return trained_part


def _pass_on_frozen(module: nn.Module, trained: frozenset[nn.Module]) -> None:
    """Let all parts that are frozen return their input."""
    for name, part in [*module.named_children()]:
        if part in trained:
            continue
        if trained & {*part.modules()}:
            _pass_on_frozen(part, trained)
        elif type(module).forward is nn.Sequential.forward:
            delattr(module, name)  # the others keep their names
        else:
            setattr(module, name, nn.Identity())


def _enters(network: EmbeddingModel, x: Tensor) -> Tensor:
    """Return what goes into the first trained module, of normalised inputs (n, ...)."""
    if network.body_is_frozen:
        return network.embed(x)
    trained = network.trained or frozenset()
    first = next(module for module in network.modules() if module in trained)
    entering: Tensor = seen_at(first, lambda: network.embed(x), entering=True)[0]
    return entering


def _rest(task: Task) -> tuple[FlatModel, int] | None:
    """Return the network behind the frozen part, and q, the numbers that go into it.

    None where what is frozen is no first part of the network: the two together must
    give what the network does.
    """
    network, spec, device = task.model.module, task.spec, task.model.device
    shape, generator = (2, *spec.image_shape), torch.Generator().manual_seed(0)
    sample = torch.randint(spec.largest_whole + 1, shape, generator=generator)
    inputs = task.normalize(sample.to(device, spec.torch_dtype))
    try:
        with torch.no_grad():
            expected = network.eval().embed(inputs)
            entering = _enters(network, inputs)
            trained_part = _behind(network, entering.shape[1:]).eval()
            rows = entering.flatten(start_dim=1)
            outputs = trained_part.embed(rows[:, :, None, None])
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None
    if outputs.shape != expected.shape:
        return None
    # No more than rounding apart.
    is_same = (outputs - expected).abs().max() <= 1e-3 * expected.abs().max()
    return (FlatModel(trained_part, device), rows.shape[1]) if is_same else None


_MOST_NUMBERS = 2**14  # 64 KiB: 4 GB for 60,000 inputs


def of_embeddings(task: Task) -> Task:
    """Return the task of training on what the frozen first part computes.

    Its weights, (num_weights,), are those of ``task``. Inputs are float32 of shape (n,
    1, 1, q), for a head alone φ(x). Where it cannot be, it is ``task`` itself.
    """
    network = task.model.module
    if network.trained is None or (trained_part := _rest(task)) is None:
        return task
    if task.training.augmentation != "none":
        log.warning(
            "the frozen network runs in every step, as images are changed at random: "
            "with training.augmentation none each would be embedded once"
        )
        return task
    overridden = ("head", "losses", "position_losses")
    overrides = any(
        getattr(type(network), name) is not getattr(EmbeddingModel, name)
        for name in overridden
    )
    if overrides or not network.learns_from_embeddings:
        log.warning("the frozen network runs in every step, as its loss needs it to")
        return task
    flat, width = trained_part
    if width > _MOST_NUMBERS:
        log.warning(
            "the frozen blocks run in every step, as %d numbers go into the trained "
            "ones: more than the %d an input that are kept on disk",
            *(width, _MOST_NUMBERS),
        )
        return task
    zeros, unit = (0.0,) * width, (1.0,) * width
    return replace(
        task,
        model=flat,
        normalize=lambda rows: rows.float().permute(0, 3, 1, 2),
        spec=InputSpec((1, 1, width), task.spec.num_classes, zeros, unit, "float32"),
    )


def embeddings_of(
    images: NDArray[Any],
    task: Task,
    model: Choice[Settings],
    spec: InputSpec,
    root: Path | None = None,
) -> NDArray[np.float32]:
    """Return what the frozen part makes of inputs (n, h, w, ch), memory-mapped.

    float32, shape (n, 1, 1, q). They are computed where the cache, or the folder
    ``root``, does not have them; what was computed before an interruption is not
    computed again. ``model`` is what ``task`` trains the rest of, and ``spec`` what
    `of_embeddings` says of them.
    """
    left_out = ("weights", "frozen")  # where they are from, and what is told below
    chosen = {
        key: setting for key, setting in plain(model).items() if key not in left_out
    }
    source = {
        "inputs": digest_of(images),
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
        rows = RowFile(folder / _ROWS, spec.image_shape, np.dtype(np.float32))
        for part in _computed(images, task, spec, parts):
            rows.append(part.reshape(-1, *spec.image_shape))
        rows.finish()
        shutil.rmtree(parts)

    def read(folder: Path) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = np.load(folder / _ROWS, mmap_mode="r")
        if len(rows) != len(images):
            raise ValueError(f"expected {len(images)} rows, found {len(rows)}")
        return rows

    if len(images) == 0:
        return np.zeros((0, *spec.image_shape), np.float32)
    return cached("embeddings", source, read, fill, root)


_ROWS = "rows.npy"
_BATCHES_AT_ONCE = 8


def _computed(
    images: NDArray[Any], task: Task, spec: InputSpec, parts: Path
) -> Iterator[NDArray[np.float32]]:
    """Yield rows (m, q), which are kept in the folder ``parts`` meanwhile."""

    def compute(some: Tensor) -> Tensor:
        entering = _enters(task.model.module.eval(), task.normalize(some))
        return entering.flatten(start_dim=1)

    at_once = _BATCHES_AT_ONCE * task.evaluation_batch_size
    starts = range(0, len(images), at_once)
    shown = sys.stderr.isatty() and len(starts) > 1
    bar = track(starts, "embedding", console=Console(stderr=True), disable=not shown)
    for start in bar:
        file = parts / f"{start:09d}.npy"
        if not file.exists():
            some = torch.from_numpy(np.array(images[start : start + at_once]))
            embeddings = task.in_batches(some, compute, spec.image_shape[-1]).numpy()
            draft = file.with_suffix(".draft.npy")
            np.save(draft, embeddings)
            draft.rename(file)
        yield np.load(file)


def digest_of(images: NDArray[Any]) -> str:
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
        replace(split, images=embeddings_of(split.images, task, model, spec))
        for split in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test, spec=spec)


def embedded_examples(
    examples: Examples,
    task: Task,
    model: Choice[Settings],
    spec: InputSpec,
    root: Path,
) -> Examples:
    """Return a site's examples as their embeddings; see `embeddings_of`."""
    embeddings = embeddings_of(examples.images.numpy(), task, model, spec, root)
    return Examples(torch.from_numpy(np.array(embeddings)), examples.labels)
