"""Training behind the frozen first part of a network, on activations computed once.

If only the head or the last blocks are trained, their inputs are the same in every
round. A client's examples are then replaced by these activations and the model by its
trained part, so that neither methods nor predictors run the frozen part. The exported
model is the whole network again.
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
from knnper.embedding_model import EmbeddingModel
from knnper.files import UNFINISHED
from knnper.flat_model import FlatModel
from knnper.settings import Choice, Settings, plain
from knnper.split_network import seen_at
from knnper.strategies.core.task import Task

_MOST_NUMBERS = 2**14  # of an activation; 64 KiB, or 4 GB for 60,000 inputs
_ROWS = "rows.npy"
_BATCHES_AT_ONCE = 8
_IMAGES_AT_ONCE = 4096

log = logging.getLogger(__name__)


class HeadModel(EmbeddingModel):
    """The head of a network as a model of its own; its inputs are embeddings."""

    def __init__(self, network: EmbeddingModel) -> None:
        super().__init__()
        self.features = nn.Flatten()
        # A copy, since each model has its own vector of weights.
        self.classifier = copy.deepcopy(network.classifier)
        self.embedding_dim = network.embedding_dim
        self.num_classes = network.num_classes
        self.criterion = network.criterion
        self.memory_format = network.memory_format


def _trained_part_of(network: EmbeddingModel, shape: torch.Size) -> EmbeddingModel:
    """Return a copy of the part of a network behind its frozen part.

    Its inputs are rows of q numbers, (n, q, 1, 1): outputs of the frozen part, of this
    ``shape`` each.
    """
    if network.body_is_frozen:
        return HeadModel(network)
    trained_part = copy.deepcopy(network)
    _remove_frozen(trained_part, trained_part.trained or frozenset())

    def shaped(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        # A copy, since the first layer may work in place.
        return inputs[0].reshape(-1, *shape).clone()

    trained_part.features.register_forward_pre_hook(shaped)
    return trained_part


def _remove_frozen(module: nn.Module, trained: frozenset[nn.Module]) -> None:
    """Remove all frozen parts, or replace them by identities."""
    for name, part in [*module.named_children()]:
        if part in trained:
            continue
        if trained & {*part.modules()}:
            _remove_frozen(part, trained)
        elif type(module).forward is nn.Sequential.forward:
            delattr(module, name)  # the other children keep their names
        else:
            setattr(module, name, nn.Identity())


def _activations(network: EmbeddingModel, x: Tensor) -> Tensor:
    """Return the input of the first trained module, for normalised inputs (n, ...)."""
    if network.body_is_frozen:
        return network.embed(x)
    trained = network.trained or frozenset()
    first = next(module for module in network.modules() if module in trained)
    entering: Tensor = seen_at(first, lambda: network.embed(x), entering=True)[0]
    return entering


def _split_off_frozen(task: Task) -> tuple[FlatModel, int] | None:
    """Return the network behind the frozen part, and q, the size of its inputs.

    Returns None if the frozen modules are no first part of the network. This is tested
    on a sample: both parts together must compute the same as the network.
    """
    network, spec, device = task.model.module, task.spec, task.model.device
    shape, generator = (2, *spec.image_shape), torch.Generator().manual_seed(0)
    sample = torch.randint(spec.largest_whole + 1, shape, generator=generator)
    inputs = task.normalize(sample.to(device, spec.torch_dtype))
    try:
        with torch.no_grad():
            expected = network.eval().embed(inputs)
            activations = _activations(network, inputs)
            trained_part = _trained_part_of(network, activations.shape[1:]).eval()
            rows = activations.flatten(start_dim=1)
            outputs = trained_part.embed(rows[:, :, None, None])
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None
    if outputs.shape != expected.shape:
        return None
    # Equal except for rounding.
    is_same = (outputs - expected).abs().max() <= 1e-3 * expected.abs().max()
    return (FlatModel(trained_part, device), rows.shape[1]) if is_same else None


def of_embeddings(task: Task) -> Task:
    """Return the task of training on the activations of the frozen first part.

    Its weights, (num_weights,), are those of ``task``. Inputs are float32 of shape (n,
    1, 1, q); if the head alone is trained, they are φ(x). Returns ``task`` itself if
    the network cannot be split, and logs the reason.
    """
    network = task.model.module
    if network.trained is None or (trained_part := _split_off_frozen(task)) is None:
        return task
    if task.training.augmentation != "none":
        log.warning(
            "the frozen network runs in every step, because images are augmented; with "
            "training.augmentation none each would be embedded once"
        )
        return task
    overridden = ("head", "losses", "position_losses")
    overrides = any(
        getattr(type(network), name) is not getattr(EmbeddingModel, name)
        for name in overridden
    )
    if overrides or not network.learns_from_embeddings:
        log.warning("the frozen network runs in every step, because its loss needs it")
        return task
    flat, width = trained_part
    if width > _MOST_NUMBERS:
        log.warning(
            "the frozen blocks run in every step, because their output has %d numbers "
            "for each input; at most %d are stored",
            width,
            _MOST_NUMBERS,
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
    """Return the activations of the frozen part, memory-mapped, (n, 1, 1, q), float32.

    They are read from the cache, or the folder ``root``, or computed and written there.
    An interrupted computation continues where it stopped.

    Parameters
    ----------
    images
        Inputs, shape (n, h, w, ch).
    task
        The task with the whole network.
    model
        The section ``model`` of the experiment.
    spec
        Form of the activations, from `of_embeddings`.
    """
    # ``weights`` is a path, and ``frozen`` enters the key apart.
    left_out = ("weights", "frozen")
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
        for part in _compute_parts(images, task, spec, parts):
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


def _compute_parts(
    images: NDArray[Any], task: Task, spec: InputSpec, parts: Path
) -> Iterator[NDArray[np.float32]]:
    """Yield rows (m, q), each also saved in the folder ``parts`` for a restart."""

    def compute(batch: Tensor) -> Tensor:
        activations = _activations(task.model.module.eval(), task.normalize(batch))
        return activations.flatten(start_dim=1)

    at_once = _BATCHES_AT_ONCE * task.evaluation_batch_size
    starts = range(0, len(images), at_once)
    shown = sys.stderr.isatty() and len(starts) > 1
    bar = track(starts, "embedding", console=Console(stderr=True), disable=not shown)
    for start in bar:
        file = parts / f"{start:09d}.npy"
        if not file.exists():
            part = torch.from_numpy(np.array(images[start : start + at_once]))
            embeddings = task.in_batches(part, compute, spec.image_shape[-1]).numpy()
            draft = file.with_suffix(".draft.npy")
            np.save(draft, embeddings)
            draft.rename(file)
        yield np.load(file)


def digest_of(images: NDArray[Any]) -> str:
    """Return the SHA-256 of an array, read in parts, as it may exceed the memory."""
    digest = hashlib.sha256(f"{images.dtype} {images.shape}".encode())
    for start in range(0, len(images), _IMAGES_AT_ONCE):
        digest.update(
            np.ascontiguousarray(images[start : start + _IMAGES_AT_ONCE]).data
        )
    return digest.hexdigest()


def embedded(
    dataset: Dataset, task: Task, model: Choice[Settings], spec: InputSpec
) -> Dataset:
    """Replace the inputs of a data set by their activations; see `embeddings_of`."""
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
    """Replace a site's inputs by their activations; see `embeddings_of`."""
    embeddings = embeddings_of(examples.images.numpy(), task, model, spec, root)
    return Examples(torch.from_numpy(np.array(embeddings)), examples.labels)
