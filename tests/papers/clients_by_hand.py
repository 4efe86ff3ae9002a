"""New clients made by hand, whose global model is a known function."""

import torch
from torch import Tensor

from papers.memory import Embedded, NewClient

NUM_CLASSES = 3


def head(embeddings: Tensor) -> Tensor:
    """Return the global model's probabilities: the first three numbers decide."""
    return torch.softmax(embeddings[:, :NUM_CLASSES], dim=1)


def embedded(count: int, seed: int) -> Embedded:
    """Return images whose labels the global model knows in part."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(count, 5, generator=generator)
    noise = torch.randn(count, NUM_CLASSES, generator=generator)
    labels = (embeddings[:, :NUM_CLASSES] + embeddings[:, 2:] + noise).argmax(dim=1)
    return Embedded(embeddings, head(embeddings), labels)


def new_client(num_known: int, num_test: int, seed: int) -> NewClient:
    """Return a client with so many images."""
    return NewClient(embedded(num_known, seed), embedded(num_test, 1000 + seed))
