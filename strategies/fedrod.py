"""FedRoD: a shared model with a balanced loss, and a personal head added to its head.

Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image
Classification", ICLR 2022, section 4, Fed-RoD (linear). From z = φ(x) the generic head
G and the personal head P_m of client m compute logits (n, c). A step on a mini-batch is

    (φ, G) ← SGD on -log( N_my^γ exp G_y(z) / Σ_c N_mc^γ exp G_c(z) )
    P_m ← SGD on -log softmax(G(z) + P_m(z))_y, z and G(z) fixed

where N_mc counts the client's training examples of class c: the balanced softmax of Ren
et al., "Balanced Meta-Softmax for Long-Tailed Visual Recognition", NeurIPS 2020. The
server averages the (φ, G), as FedAvg does; P_m stays with the client, which serves
softmax(G(z) + P_m(z)). Both heads are linear, so this is one model with the head
G + P_m.

Departures from the paper:

- Only the linear P_m is implemented, not the variant in which a hypernetwork generates
  it from a client's class frequencies.
- P_m starts at 0, where a client serves the generic model, and has no dropout.
- An unseen client trains P_m on the fixed generic model; weight decay then acts on
  G + P_m.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData
from knnper.embedding_model import EmbeddingModel
from knnper.errors import ConfigError, Problem
from knnper.flat_model import FlatModel
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, Settings
from knnper.strategies.core.final_training import trained_on_both_splits
from knnper.strategies.core.frozen import HeadModel
from knnper.strategies.core.method import Method
from knnper.strategies.core.optimizers import Sgd
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload, ModelUpdate
from knnper.strategies.core.sharing import PersonalPart, part_in_use
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd, step_beside


@dataclass(frozen=True)
class FedRoDSettings(Settings):
    """The balance of the generic head, and the training of unseen clients' heads.

    Attributes
    ----------
    prior_exponent
        γ, the exponent of the class counts in the balanced softmax, useful from 0 to 1:
        1 removes the client's class frequencies from the shared model; 0 keeps them,
        which makes the shared model FedAvg's.
    unseen_epochs
        Passes over its data in which an unseen client trains its head.
    """

    prior_exponent: NonNegativeFloat = 1.0
    unseen_epochs: PositiveInt = 10


class FedRoD(Method):
    """A shared model trained as if classes were balanced, and personal heads."""

    title = "FedRoD"
    needs_sgd = "its two heads make steps of SGD side by side"
    needs_cross_entropy = "its generic head minimises the balanced softmax"
    source = "Chen and Chao 2022, section 4"
    client_state = "< 1 (the head)"
    unseen = "the global model, with a head of its own added to it"
    learns_from_validation = "unseen"
    trains_unseen_from_start = True
    reference_title = "FedRoD (generic head)"
    ends_with_global_model = True
    client_state_type = PersonalPart

    settings: FedRoDSettings

    def __init__(self, task: Task, settings: FedRoDSettings) -> None:
        super().__init__(task, settings)
        module = task.model.module
        head = {*module.classifier.modules()}
        layers = {entry.module for entry in task.model.entries} & head
        if len(layers) != 1:
            message = (
                f"found a model with {len(layers)} layers with weights in its head, "
                "expected one linear layer: the logits of two heads are added by "
                "adding their weights; choose another model, or the method fedrep"
            )
            raise ConfigError([Problem("method.name", message)])
        # Scratch, like the task's model: load P_m before each use.
        self._personal_head = FlatModel(HeadModel(module), task.model.device)
        self._personal_head.module.eval()

    @override
    def client_update(
        self,
        payload: ModelPayload,
        client_state: PersonalPart | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[PersonalPart, ModelUpdate]:
        rate = self.task.training.learning_rate_at(server_round)
        personal_head = self._personal_head
        zero = torch.zeros(personal_head.num_weights)
        personal_head.load(client_state.personal if client_state else zero)
        optimizer = Sgd(self.task, personal_head.tensors, rate)
        counts = torch.bincount(data.train.labels, minlength=self.task.spec.num_classes)
        # -∞ for an absent class, which drops out of the softmax.
        log_prior = counts.float().pow(self.settings.prior_exponent).log()
        log_prior = log_prior.to(self.task.model.device)

        def losses(module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
            features = module.embed(inputs)
            generic = module.head(features).float()
            personal = personal_head.module.head(features.detach()).float()
            balanced = module.criterion(generic + log_prior, labels)
            return balanced + module.criterion(generic.detach() + personal, labels)

        trained = local_sgd(
            self.task,
            payload.weights,
            data.train,
            rate,
            rng,
            objective=losses,
            local_step=step_beside(personal_head, optimizer),
        )
        return PersonalPart(personal_head.read()), trained.update(len(data.train))

    @override
    def personalize(
        self,
        payload: ModelPayload,
        client_state: PersonalPart | None,
        data: ClientData,
        rng: RandomKey,
    ) -> ModelPredictor:
        part, head = part_in_use(client_state, data), self.task.head_mask
        if part is not None:
            weights = payload.weights.clone()
            weights[head] += part.personal
            return ModelPredictor(self.task, weights)
        return trained_on_both_splits(
            self.task,
            payload.weights,
            data,
            rng,
            num_epochs=self.settings.unseen_epochs,
            learning_rate=self.task.first_rate,
            trainable=head,
        )
