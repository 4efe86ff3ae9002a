"""The global model that training ended with, ready to be used."""

from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.config.errors import RunError
from knnper.config.sections import Experiment, TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.data.examples import InputSpec
from knnper.data.site.agreement import SiteTask
from knnper.transport.model_folder.card import ModelCard, card_of, fingerprint_of
from knnper.transport.model_folder.errors import ModelError
from strategies.assembly import build_task
from strategies.catalogue import METHODS
from strategies.core.task import Task


@dataclass(frozen=True, eq=False)
class GlobalModel:
    """φ and the head of a trained model; made by `global_model` or `load_model`.

    Attributes
    ----------
    card
        What is known of it.
    task
        Runs it. Any number of threads may use it at a time once it has run.
    weights
        w, shape (num_weights,).
    fingerprint
        SHA-256, in hexadecimal, of all that φ and the head depend on: the weights, the
        model's name and settings, how images are normalised, and the precision.
    """

    card: ModelCard
    task: Task
    weights: Tensor
    fingerprint: str

    def embed(self, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p), of inputs (n, h, w, ch)."""
        return self.task.embed(self.weights, images)

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the model's probabilities (n, c) from its embeddings (n, p)."""
        return self.task.head(self.weights, embeddings)

    @property
    def embedding_dim(self) -> int:
        """p, the size of an embedding."""
        return self.task.model.module.embedding_dim

    @property
    def spec(self) -> InputSpec:
        """What the model knows about the data."""
        return self.card.spec

    @property
    def class_names(self) -> tuple[str, ...]:
        """One for each label."""
        return self.card.class_names


def global_model(
    experiment: Experiment, task: Task, learned: SiteTask, weights: Tensor
) -> GlobalModel:
    """Return the model that a run of ``experiment`` ended with.

    Parameters
    ----------
    experiment
        Its settings; the method must be one that `require_global_model` accepts.
    task
        What was learned, as `strategies.assembly.assemble` makes it.
    learned
        What the model knows about the data.
    weights
        w, shape (num_weights,): of the server's last state, or of the payload that a
        client is handed.
    """
    card = card_of(experiment, learned)
    return GlobalModel(card, task, weights, fingerprint_of(card, weights))


def model_of_card(card: ModelCard, weights: Tensor) -> GlobalModel:
    """Return the model that ``card`` describes.

    Raises
    ------
    ModelError
        If this version cannot build it, or the weights are another model's.
    """
    task = build_task(
        card.architecture(),
        TrainingSettings(precision=card.precision),
        card.spec,
        RandomKey(card.seed),
        evaluation_batch_size=card.evaluation_batch_size,
    )
    expected = (task.model.num_weights,)
    if tuple(weights.shape) != expected or weights.dtype != torch.float32:
        raise ModelError(
            f"expected weights of shape {expected} and type float32, found "
            f"{tuple(weights.shape)} and {weights.dtype}; they belong to another model"
        )
    return GlobalModel(card, task, weights, fingerprint_of(card, weights))


def ends_with_global_model(experiment: Experiment) -> bool:
    """Return whether a run ends with one trained model for all clients.

    What the server announces and a site keeps; see `MethodSpec.ends_with_global_model`.
    """
    return METHODS[experiment.method.name].ends_with_global_model


def require_global_model(experiment: Experiment, source: str) -> None:
    """Refuse a method that does not end with one trained model for all clients.

    Parameters
    ----------
    experiment
        Its settings.
    source
        Where they are from, as in ``the run in runs/demo``.

    Raises
    ------
    RunError
        Of Local (it trains one a client), FedEM (several that are mixed), FedPer (a
        part of one), L2GD (clients' own, of which the server has the mean) and others.
    """
    if not ends_with_global_model(experiment):
        title = METHODS[experiment.method.name].title
        raise RunError(
            f"{source} trained with {title}, which does not end with "
            "one model for all clients; expected a run of a method that does, such as "
            "FedAvg or kNN-Per"
        )


def require_fingerprint(model: GlobalModel, expected: str, source: str) -> None:
    """Refuse a model that is not the one that was announced.

    Parameters
    ----------
    model
        What is at hand.
    expected
        The fingerprint that it should have.
    source
        Where it is from.

    Raises
    ------
    ModelError
        If they differ.
    """
    if model.fingerprint != expected:
        raise ModelError(
            f"{source}: expected the model {expected[:12]}, found "
            f"{model.fingerprint[:12]}; it was damaged or replaced on "
            "its way, or the two sides run different versions. Get it again from where "
            "it was exported"
        )
