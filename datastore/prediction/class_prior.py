"""The global model with a client's own shares of the classes.

A client sees some classes more often than the federation does. With the shares π that
the global model learned from and the client's own q, Bayes' rule gives

    p(y|x) ∝ p_global(y|x) q(y) / π(y)

(Saerens, Latinne, Decaestecker, "Adjusting the Outputs of a Classifier to New a Priori
Probabilities: A Simple Procedure", Neural Computation 2002, section 2). The client
learns q from its labels: π counts for s examples, and n_y of its n examples are of
class y,

    q(y) = (n_y + s π(y)) / (n + s)

which is the posterior mean under a Dirichlet distribution. Of several s each counts by
how probable it makes the client's labels, so that q stays near π where they look as
everywhere, and follows them where they do not.

The rule holds for a model that is as sure as it is right. One that was trained for a
few rounds is less sure, and q would outvote it; so it may be sharpened, to p_global^β.
This is a temperature of 1/β (Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern
Neural Networks", ICML 2017, section 4.2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from datastore.contents import Contents
from datastore.store_reader import StoreReader
from knnper.config.errors import ConfigError, Problem
from knnper.config.ranges import PositiveFloat
from knnper.config.sections import Settings


@dataclass(frozen=True)
class ClassPriorSettings(Settings):
    """How a client's own shares of the classes are learned.

    Attributes
    ----------
    strengths
        s: how many examples π counts for; useful from 1 to 300. Several are weighed by
        the client's labels. With none the global model stays as it is.
    class_shares
        π: how often each class is in what the global model learned from, as shares or
        as counts; none is all alike.
    sharpness
        The values of β that a client chooses from; useful from 1 to 6.
    """

    strengths: tuple[PositiveFloat, ...] = ()
    class_shares: tuple[PositiveFloat, ...] = ()
    sharpness: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (1.0,)


@dataclass(frozen=True)
class ClassPrior:
    """What a client uses.

    Attributes
    ----------
    settings
        How its shares of the classes are learned, of one strength at least.
    sharpness
        β.
    """

    settings: ClassPriorSettings
    sharpness: float = 1.0


def require_class_shares(settings: ClassPriorSettings, num_classes: int) -> None:
    """Refuse shares of other classes than the c of the task.

    Raises
    ------
    ConfigError
        If there are some, and not c.
    """
    found = len(settings.class_shares)
    if found not in (0, num_classes):
        message = (
            f"expected {num_classes} numbers, one for each class, or none for classes "
            f"that are all alike, found {found}"
        )
        raise ConfigError([Problem("class_shares", message)], "the class prior")


@dataclass(frozen=True)
class AdaptedHead:
    """The global model's head, adapted to what a client stores by now.

    Attributes
    ----------
    head
        From representations (n, p) to the global model's probabilities (n, c).
    store
        Its labels are counted anew at each call.
    prior
        How they count.
    """

    head: Callable[[Tensor], Tensor]
    store: StoreReader
    prior: ClassPrior

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, c), for representations (n, p)."""
        counts = count_labels(self.store.contents(), self.store.num_classes)
        return adapted(self.head(embeddings), counts, self.prior)


def count_labels(contents: Contents, num_classes: int) -> Tensor:
    """Return how many stored examples are of each class, int64 of shape (1, c)."""
    labels = torch.from_numpy(contents.labels)
    return torch.bincount(labels, minlength=num_classes)[None]


def adapted(probabilities: Tensor, label_counts: Tensor, prior: ClassPrior) -> Tensor:
    """Return the global model's probabilities to the power β times q/π, normalised.

    Parameters
    ----------
    probabilities
        Float32, shape (n, c), rows summing to 1.
    label_counts
        n_y, int64 of shape (n, c), or (1, c) for all rows. A row without examples
        changes nothing.
    prior
        s, π and β.

    Returns
    -------
    Tensor
        Float32, shape (n, c), rows summing to 1.

    Raises
    ------
    ConfigError
        As `require_class_shares`.
    """
    ratios = class_ratios(label_counts, prior.settings)
    found = reweighted(probabilities, ratios, prior.sharpness)
    return found.where(label_counts.sum(dim=1, keepdim=True) > 0, probabilities)


def reweighted(probabilities: Tensor, ratios: Tensor, sharpness: float) -> Tensor:
    """Return p^β r, normalised: float32 of shape (n, c), rows summing to 1.

    Parameters
    ----------
    probabilities
        p, shape (n, c), rows summing to 1.
    ratios
        r, positive, shape (n, c) or (1, c).
    sharpness
        β.
    """
    largest = probabilities.double().amax(dim=1, keepdim=True)
    # Relative to the largest, of which no power is 0.
    weighted = (probabilities / largest).pow(sharpness) * ratios
    return (weighted / weighted.sum(dim=1, keepdim=True)).float()


def class_ratios(label_counts: Tensor, settings: ClassPriorSettings) -> Tensor:
    """Return q/π, float64 of shape (m, c), for counts n_y of that shape.

    Raises
    ------
    ConfigError
        As `require_class_shares`.
    """
    num_classes = label_counts.shape[1]
    require_class_shares(settings, num_classes)
    given = settings.class_shares or (1.0,) * num_classes
    shares = torch.tensor(given, dtype=torch.float64)
    shares /= shares.sum()
    strengths = torch.tensor(settings.strengths, dtype=torch.float64)[:, None, None]
    counts, expected = label_counts.double(), strengths * shares
    totals = counts.sum(dim=1, keepdim=True)
    own = (counts + expected) / (totals + strengths)
    belief = torch.softmax(_log_evidence(counts, expected), dim=0)
    return (belief[:, :, None] * own).sum(dim=0) / shares


def _log_evidence(counts: Tensor, expected: Tensor) -> Tensor:
    """Return log P(labels | s), shape (s, m): the Dirichlet-multinomial distribution.

    Parameters
    ----------
    counts
        n_y, shape (m, c).
    expected
        s π(y), shape (s, 1, c).
    """
    total, strength = counts.sum(dim=1), expected.sum(dim=2)
    of_classes = torch.lgamma(counts + expected) - torch.lgamma(expected)
    of_total = torch.lgamma(strength) - torch.lgamma(total + strength)
    return of_total + of_classes.sum(dim=2)
