"""The clients of a partition, with the samples of each."""

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from knnper.simulation.partition.allocation import ClassWeights, Integers


@dataclass(frozen=True, eq=False)
class ClientPart:
    """One client's samples; it may have none.

    Attributes
    ----------
    name
        A padded decimal number, so that names sort as their numbers.
    seen
        Whether the client may take part in training.
    train, validation
        Sorted int64 indices into the training split.
    test
        Sorted int64 indices into the test split.
    class_weights
        The weight of a test example of each label, shape (c,); None for equal weights.
    title
        Its name in the data, as a file name; empty if the data has none. Nothing random
        depends on it.
    """

    name: str
    seen: bool
    train: Integers
    validation: Integers
    test: Integers
    class_weights: ClassWeights | None = None
    title: str = ""

    @property
    def shown(self) -> str:
        """The client's name in tables and files."""
        return self.title or self.name


@dataclass(frozen=True, eq=False)
class Clients(Sequence[ClientPart]):
    """The clients of a partition, in the order of their names.

    A client's samples are computed on access: there may be a million clients.

    Attributes
    ----------
    titles
        As `ClientPart.title`; empty if the data names no clients.
    seen
        Shape (M,).
    sizes
        The number of training, validation and test samples, shape (3, M).
    part
        Computes the samples of a client.
    origin
        The content that all samples are computed from, for a fingerprint.
    """

    names: Sequence[str]
    titles: Sequence[str]
    seen: NDArray[np.bool_]
    sizes: Integers
    part: Callable[[int], ClientPart]
    origin: Sequence[bytes] = ()

    @classmethod
    def of(cls, parts: Sequence[ClientPart]) -> "Clients":
        """Return the clients with these samples."""
        splits = [(part.train, part.validation, part.test) for part in parts]
        sizes = np.array([list(map(len, split)) for split in splits]).T
        return cls(
            [part.name for part in parts],
            [part.title for part in parts] if any(part.title for part in parts) else (),
            np.array([part.seen for part in parts], dtype=bool),
            sizes.reshape(3, len(parts)),
            parts.__getitem__,
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, client: int) -> ClientPart: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[ClientPart]: ...
    def __getitem__(self, client: int | slice) -> ClientPart | Sequence[ClientPart]:
        if isinstance(client, slice):
            return [self.part(number) for number in range(len(self))[client]]
        return self.part(range(len(self))[client])


@dataclass(frozen=True, eq=False)
class PartsByName(Mapping[str, ClientPart]):
    """The clients of a partition by name; each is computed on access."""

    clients: Clients

    def place(self, name: str) -> int:
        """Return the position of a client among all."""
        names = self.clients.names
        place = bisect.bisect_left(names, name)
        if place == len(names) or names[place] != name:
            raise KeyError(name)
        return place

    def __getitem__(self, name: str) -> ClientPart:
        return self.clients[self.place(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.clients.names)

    def __len__(self) -> int:
        return len(self.clients)


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of each client.

    Attributes
    ----------
    proxy
        The server's samples: sorted int64 indices into the training split.
    """

    clients: Clients
    proxy: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
