"""New clients, dealt anew from the images of those that took no part in training.

knn-per.txt, section 6, "Effect of local dataset's size": the global model stays what
it is, and with it the representation, whatever data the new clients have.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from knnper.config.errors import RunError
from knnper.config.seeding import RandomKey
from simulation.figures.embedded import Embedded, Embedder
from simulation.partition.assignment import Integers
from simulation.partition.dirichlet import DirichletSettings, dirichlet
from simulation.partition.split import ClientPart
from simulation.trained_model import TrainedModel


@dataclass(frozen=True, eq=False)
class Newcomer:
    """A new client's images, embedded.

    Attributes
    ----------
    known
        n_m images to learn from, in random order: with a smaller memory it has the
        first of them.
    test
        Its test images.
    """

    known: Embedded
    test: Embedded


@dataclass(frozen=True, eq=False)
class NewcomerPool:
    """The images of all clients that took no part in training, to be dealt anew.

    Attributes
    ----------
    model
        Embeds each of them once, when the first deal is made.
    """

    model: TrainedModel

    @cached_property
    def known(self) -> Embedded:
        """Their training and validation images, which the model was not trained on."""
        return Embedder(self.model).train(
            _joined(
                [
                    *(one.train for one in self._parts),
                    *(one.validation for one in self._parts),
                ]
            )
        )

    @cached_property
    def test(self) -> Embedded:
        """Their test images."""
        return Embedder(self.model).test(_joined([part.test for part in self._parts]))

    @property
    def num_clients(self) -> int:
        """Clients that took no part in training."""
        return len(self._parts)

    @property
    def num_known(self) -> int:
        """Their training and validation images."""
        return sum(len(part.train) + len(part.validation) for part in self._parts)

    def require_clients(self, num_clients: int) -> None:
        """Refuse more new clients than there are images for.

        Raises
        ------
        RunError
            If all clients took part in training, those that did not have no test
            images, or some new ones would have nothing.
        """
        if self.num_clients == 0:
            raise RunError(
                "all clients took part in training, expected some that did not, whose "
                "images new clients get; run with --set partition.unseen_fraction=0.2"
            )
        if all(len(part.test) == 0 for part in self._parts):
            raise RunError(
                f"found no test images at the {self.num_clients} unseen clients; run "
                "with a larger partition.unseen_fraction"
            )
        if num_clients > self.num_known:
            raise RunError(
                f"found {num_clients} clients, expected at most {self.num_known}, the "
                "training images of the unseen clients; give fewer --clients"
            )

    def deal(
        self, num_clients: int, alpha: float, key: RandomKey
    ) -> tuple[Newcomer, ...]:
        """Deal all images to new clients, each label by a Dirichlet draw.

        Parameters
        ----------
        num_clients
            M.
        alpha
            α of the draws.
        key
            Fixes every random choice.
        """
        settings = DirichletSettings(num_clients=num_clients, alpha=alpha)
        labels = self.known.labels.numpy(), self.test.labels.numpy()
        dealt = dirichlet(*labels, settings, key.child("deal"))
        return tuple(
            Newcomer(
                self.known.at(key.child("order", number).numpy().permutation(known)),
                self.test.at(test),
            )
            for number, (known, test) in enumerate(
                zip(dealt.train, dealt.test, strict=True)
            )
        )

    @property
    def _parts(self) -> tuple[ClientPart, ...]:
        clients = self.model.partition.clients
        return tuple(client for client in clients if not client.seen)


def _joined(parts: list[Integers]) -> Integers:
    """Return each index once, ascending: clients may share test images."""
    return np.unique(np.concatenate(parts))
