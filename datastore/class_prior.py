"""The class prior: the global model adapted to a client's own class frequencies.

A client sees some classes more often than the federation does. Let π be the class
frequencies that the global model was trained on and q the client's own. Bayes' rule
gives

    p(y|x) ∝ p_global(y|x) q(y) / π(y)

(Saerens, Latinne, Decaestecker, "Adjusting the Outputs of a Classifier to New a Priori
Probabilities: A Simple Procedure", Neural Computation 2002, section 2). The client
estimates q from its labels. With n_y of its n examples in class y, and π counting for
s examples,

    q(y) = (n_y + s π(y)) / (n + s)

which is the posterior mean under a Dirichlet prior. If several values of s are given,
the estimates are averaged, each weighted by the likelihood of the client's labels under
it. So q stays near π if the labels look like the federation's, and follows the labels
if they do not.

The rule assumes calibrated probabilities. A model that was trained for a few rounds
only is underconfident, and q would outvote it. It can therefore be sharpened first, to
p_global^β. This is temperature scaling with temperature 1/β (Guo, Pleiss, Sun,
Weinberger, "On Calibration of Modern Neural Networks", ICML 2017, section 4.2).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from knnper.datastore.examples import Contents
from knnper.errors import ConfigError, Problem
from knnper.settings import PositiveFloat, Settings

_DEFAULT_STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True)
class ClassPriorSettings(Settings):
    """How a client's own class frequencies are estimated.

    Attributes
    ----------
    strengths
        s, the number of examples that π counts for; useful from 1 to 300. Several are
        weighted by the likelihood of the client's labels. Empty switches the class
        prior off.
    class_shares
        π, the class frequencies in the global model's training data, as fractions or
        as counts. Empty stands for a uniform distribution.
    sharpness
        The values of β that a client chooses from; useful from 1 to 6.
    """

    strengths: tuple[PositiveFloat, ...] = ()
    class_shares: tuple[PositiveFloat, ...] = ()
    sharpness: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (1.0,)


@dataclass(frozen=True)
class ClassPrior:
    """The class prior of one client, with the β that it chose."""

    settings: ClassPriorSettings  # with at least one strength
    sharpness: float = 1.0  # β


def require_class_shares(settings: ClassPriorSettings, num_classes: int) -> None:
    """Check that ``class_shares`` has no entry or one for each class."""
    if len(settings.class_shares) not in (0, num_classes):
        message = (
            f"expected {num_classes} numbers, one for each class, or none for a "
            f"uniform distribution, found {len(settings.class_shares)}"
        )
        raise ConfigError([Problem("class_shares", message)], "the class prior")


def count_labels(contents: Contents, num_classes: int) -> Tensor:
    """Count the stored examples of each class, int64 of shape (1, c)."""
    label_counts = contents.label_counts
    counts = torch.zeros((1, num_classes), dtype=torch.int64)
    counts[0, : len(label_counts)] = torch.from_numpy(label_counts)
    return counts


def adapt_probabilities(
    probabilities: Tensor, label_counts: Tensor, prior: ClassPrior
) -> Tensor:
    """Return p_global^β q/π, normalised, of shape (n, c).

    Parameters
    ----------
    probabilities
        p_global, shape (n, c), rows summing to 1.
    label_counts
        n_y, shape (n, c), or (1, c) for all rows. A row without examples leaves the
        probabilities unchanged.
    """
    ratios = class_ratios(label_counts, prior.settings)
    reweighted = reweight_classes(probabilities, ratios, prior.sharpness)
    has_examples = label_counts.sum(dim=1, keepdim=True) > 0
    return reweighted.where(has_examples, probabilities)


def reweight_classes(probabilities: Tensor, ratios: Tensor, sharpness: float) -> Tensor:
    """Return p^β r, normalised, for p (n, c) and positive r (n, c) or (1, c)."""
    largest = probabilities.double().amax(dim=1, keepdim=True)
    # Relative to the largest, so that not all powers of a row underflow to 0.
    weighted = (probabilities / largest).pow(sharpness) * ratios
    return (weighted / weighted.sum(dim=1, keepdim=True)).float()


def class_ratios(label_counts: Tensor, settings: ClassPriorSettings) -> Tensor:
    """Return q/π, float64 of shape (m, c), for counts n_y of that shape."""
    num_classes = label_counts.shape[1]
    require_class_shares(settings, num_classes)
    class_shares = settings.class_shares or (1.0,) * num_classes
    shares = torch.tensor(class_shares, dtype=torch.float64)
    shares /= shares.sum()
    strengths = torch.tensor(settings.strengths, dtype=torch.float64)[:, None, None]
    # Shape (s, m, c): one estimate of q for each strength.
    counts, pseudo_counts = label_counts.double(), strengths * shares
    totals = counts.sum(dim=1, keepdim=True)
    estimates = (counts + pseudo_counts) / (totals + strengths)
    # log P(labels | s), shape (s, m): the Dirichlet-multinomial distribution.
    strength = pseudo_counts.sum(dim=2)
    of_classes = torch.lgamma(counts + pseudo_counts) - torch.lgamma(pseudo_counts)
    of_total = torch.lgamma(strength) - torch.lgamma(counts.sum(dim=1) + strength)
    belief = torch.softmax(of_total + of_classes.sum(dim=2), dim=0)
    return (belief[:, :, None] * estimates).sum(dim=0) / shares


def label_information(label_counts: Tensor) -> float:
    """Measure how well a client's other labels predict a label, in nats an example.

    This is the mean of log q(y)/π(y) over all examples of M clients, with q estimated
    from the client's other examples and π from all clients together. It estimates what
    the class prior can add to a calibrated model if the inputs of a class look the same
    at all clients. Each example is left out of its own estimate, so the result is 0
    for clients that differ by chance alone.

    Parameters
    ----------
    label_counts
        int64 of shape (M, c), one row for each client.
    """
    totals = label_counts.sum(dim=0)
    settings = ClassPriorSettings(
        _DEFAULT_STRENGTHS, tuple(totals.clamp_min(1).tolist())
    )
    gain = 0.0
    for counts in label_counts:
        present = counts.nonzero()[:, 0]
        left_out = torch.nn.functional.one_hot(present, len(counts))
        ratios = class_ratios(counts - left_out, settings)
        log_ratios = ratios.gather(1, present[:, None])[:, 0].log()
        gain += float((counts[present] * log_ratios).sum())
    return gain / max(int(totals.sum()), 1)
