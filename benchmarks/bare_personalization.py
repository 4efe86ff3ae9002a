"""kNN-Per's personalisation in plain torch and FAISS, many clients at once."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.bare_loop import BareImages
from benchmarks.bare_model import bare_images, embed, mobilenet_v2
from benchmarks.workload import Workload
from knnper.datastore.memory import KnnSettings
from knnper.simulation.partition.clients import ClientPart

EMBEDDED_AT_ONCE = 256


@dataclass(frozen=True)
class PersonalizationShare:
    """The clients of one process."""

    workload: Workload
    weights_file: str  # tensors of the global model by torchvision's names
    clients: list[ClientPart]


@dataclass(frozen=True)
class BareResult:
    """Result of the personalisation of one client."""

    client: str
    knn_weight: float  # λ, chosen on the validation split
    personal: float  # test accuracy of the mixture
    reference: float  # test accuracy of the global model
    validation: float  # validation accuracy of the global model


@dataclass(frozen=True)
class _Split:
    """A client's split, embedded by the global model."""

    embeddings: NDArray[np.float32]  # shape (n, p)
    probabilities: Tensor  # shape (n, c)
    labels: Tensor  # int64, shape (n,)

    def accuracy(self, probabilities: Tensor) -> float:
        """Return the accuracy of the most probable class."""
        return float((probabilities.argmax(dim=1) == self.labels).float().mean())


def personalization_shares(
    workload: Workload, weights_file: str
) -> list[PersonalizationShare]:
    """Distribute all clients over as many processes as there are workers."""
    clients = list(workload.partition(workload.dataset()).clients)
    count = workload.num_workers
    return [
        PersonalizationShare(workload, weights_file, clients[number::count])
        for number in range(count)
    ]


def personalize_share(share: PersonalizationShare) -> list[BareResult]:
    """Personalise this process's clients."""
    model, train, test = _resident(share.workload)
    model.load_state_dict(model.state_dict() | load_file(share.weights_file))
    return personalize(model, train, test, share.clients)


def personalize(
    model: nn.Module, train: BareImages, test: BareImages, clients: Sequence[ClientPart]
) -> list[BareResult]:
    """Embed the images of all clients in large batches, then tune and score each."""
    model.eval()
    with torch.inference_mode():
        learnt = _splits(model, train, [client.train for client in clients])
        held_out = _splits(model, train, [client.validation for client in clients])
        tested = _splits(model, test, [client.test for client in clients])
        return [
            _result(client.name, *splits)
            for client, *splits in zip(clients, learnt, held_out, tested, strict=True)
        ]


def _splits(
    model: nn.Module, images: BareImages, shares: Sequence[NDArray[np.int64]]
) -> list[_Split]:
    positions = torch.from_numpy(np.concatenate(shares))
    parts = torch.split(positions, EMBEDDED_AT_ONCE)
    embedded = torch.cat([embed(model, images.batch(part)) for part in parts])
    probabilities = torch.softmax(model.get_submodule("classifier")(embedded), dim=1)
    sizes = [len(share) for share in shares]
    columns = (embedded, probabilities, images.labels[positions])
    return [
        _Split(embeddings.numpy(), probability, labels)
        for embeddings, probability, labels in zip(
            *(torch.split(column, sizes) for column in columns), strict=True
        )
    ]


def _result(name: str, train: _Split, validation: _Split, test: _Split) -> BareResult:
    settings = KnnSettings()
    count, num_classes = settings.num_neighbors, test.probabilities.shape[1]
    index = faiss.IndexFlatL2(train.embeddings.shape[1])
    index.add(train.embeddings)
    knn = vote(index, validation.embeddings, train.labels, count, num_classes)
    knn_weight = max(
        sorted(settings.knn_weights),
        key=lambda weight: validation.accuracy(_mix(knn, validation, weight)),
    )
    index.add(validation.embeddings)
    labels = torch.cat([train.labels, validation.labels])
    knn = vote(index, test.embeddings, labels, count, num_classes)
    return BareResult(
        client=name,
        knn_weight=knn_weight,
        personal=test.accuracy(_mix(knn, test, knn_weight)),
        reference=test.accuracy(test.probabilities),
        validation=validation.accuracy(validation.probabilities),
    )


def vote(
    index: faiss.IndexFlatL2,
    queries: NDArray[np.float32],
    labels: Tensor,
    num_neighbors: int,
    num_classes: int,
) -> Tensor:
    """Compute the share of each label in exp(-d) of the neighbours, shape (n, c)."""
    squared_distances, ids = index.search(queries, min(num_neighbors, len(labels)))
    distances = torch.from_numpy(squared_distances).clamp_min(0).sqrt()
    shares = torch.softmax(-distances, dim=1)
    votes = torch.zeros((len(queries), num_classes))
    return votes.scatter_add_(1, labels[torch.from_numpy(ids)], shares)


def _mix(knn: Tensor, split: _Split, knn_weight: float) -> Tensor:
    return knn_weight * knn + (1 - knn_weight) * split.probabilities


@functools.lru_cache(maxsize=1)
def _resident(workload: Workload) -> tuple[nn.Module, BareImages, BareImages]:
    """Build the state that this process keeps between passes."""
    data = workload.dataset()
    return mobilenet_v2(data.spec.num_classes), *bare_images(data)
