"""GPFL: a shared body, trained for shared class embeddings and for personal heads.

Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, "GPFL: Simultaneously Learning Global and
Personalized Feature Information for Personalized Federated Learning", ICCV 2023. Beside
the body φ all clients share an embedding E_y, (p,), of each class, and the conditional
valve. A condition v, (p,), sets the valve to

    V(z, v) = ReLU(z ⊙ (1 + γ(v)) + β(v)),  γ, β: LayerNorm(ReLU(linear(v)))

A client i with class frequencies π_i receives Ē = E, and sets v = mean_y Ē_y and
v_i = Σ_y π_iy Ē_y. It minimises, by φ, its own head h_i, E and V, the mean of

    loss(h_i(V(φ(x), v_i)), y)  -  log softmax(cos(V(φ(x), v), E))_y
        +  λ |V(φ(x), v) - Ē_y|

with weight decay μ on E and V. The server averages φ, E and V. A client serves
h_i(V(φ(x), v_i)).

Departures from the paper:

- The authors' code computes v and v_i from the embeddings that the client trained in
  its last round, and uses 0 before; here they come from the received embeddings.
- The last term is the mean of each example's norm. In the code it is the norm of the
  whole mini-batch, which grows with the batch size.
- Unseen clients train a head on the last φ, E and V.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.embedding_model import EmbeddingModel
from knnper.flat_model import FlatModel
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveInt, Settings
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.final_training import on_both_splits
from knnper.strategies.core.method import wrong_shape
from knnper.strategies.core.optimizers import Sgd
from knnper.strategies.core.predictors import HeadPredictor
from knnper.strategies.core.records import Record
from knnper.strategies.core.sharing import (
    PartlyShared,
    PersonalPart,
    SharedUpdate,
    part_in_use,
)
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import head_cross_entropy, local_sgd, step_beside


@dataclass(frozen=True)
class GPFLSettings(Settings):
    """The strength of the guidance by class embeddings.

    Attributes
    ----------
    magnitude_weight
        λ; useful from 0.0001 to 0.1. 0.01 in the authors' code for small networks,
        0.0001 for ResNet-18 and text.
    guidance_decay
        μ, in place of the training section's weight decay; 0.1 in the authors' code for
        small networks, 0 for ResNet-18 and text.
    unseen_epochs
        Passes over its data in which an unseen client trains its head.
    """

    magnitude_weight: NonNegativeFloat = 0.01
    guidance_decay: NonNegativeFloat = 0.1
    unseen_epochs: PositiveInt = 10


class Guidance(EmbeddingModel):
    """The class embeddings E, and the conditional valve V."""

    def __init__(self, size: int, num_classes: int) -> None:
        super().__init__()
        self.classes = nn.Embedding(num_classes, size)
        self.scale, self.shift = (
            nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size))
            for _ in range(2)
        )

    def valve(self, z: Tensor, condition: Tensor) -> Tensor:
        """Return V(z, v), shape (n, p), of embeddings (n, p) and v, (p,)."""
        moved: Tensor = z * (1 + self.scale(condition)) + self.shift(condition)
        return moved.relu()


@dataclass(frozen=True)
class ModelAndGuidance(Record):
    """The state of the server, and the payload of every client."""

    weights: Tensor  # φ and the initial head, shape (num_weights,)
    guidance: Tensor  # E and V, shape (num_guidance,)


@dataclass(frozen=True)
class GPFLUpdate(SharedUpdate):
    """The update of a client."""

    guidance: Tensor  # E and V, trained, shape (num_guidance,)


class GPFL(PartlyShared):
    """A shared body with two outputs: to class embeddings, and to personal heads."""

    title = "GPFL"
    needs_sgd = "the network and its guidance make steps of SGD side by side"
    source = "Zhang et al. 2023 (ICCV)"
    upload = "< 1 (all but the head; 2 p + c + 6 vectors of the embedding's size p)"
    download = "1 (and 2 p + c + 6 vectors of the embedding's size p)"
    client_state = "< 1 (the head)"
    server_state = "1 (and 2 p + c + 6 vectors of the embedding's size p)"
    unseen = "trains its own head on the shared body"
    learns_from_validation = "unseen"
    trains_unseen_from_start = True
    reference_title = None
    serves_one_model = False
    takes_mean = True
    state_type = ModelAndGuidance
    payload_type = ModelAndGuidance
    update_type = GPFLUpdate

    settings: GPFLSettings

    def __init__(self, task: Task, settings: GPFLSettings) -> None:
        super().__init__(task, settings, ~task.head_mask, settings.unseen_epochs)
        # Scratch, like the task's model: load E and V before each use.
        self._flat, self._guidance = self._new_guidance(RandomKey(0))

    def _new_guidance(self, rng: RandomKey) -> tuple[FlatModel, Guidance]:
        num_classes, size = self.task.spec.num_classes, self._size
        with rng.torch():
            module = Guidance(size, num_classes)
        return FlatModel(module, self.task.model.device), module

    @property
    def _size(self) -> int:
        return self.task.model.module.embedding_dim

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> ModelAndGuidance:
        drawn, _ = self._new_guidance(rng.child("guidance"))
        return ModelAndGuidance(self.task.initial_weights, drawn.read())

    def _load(self, guidance: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Load E and V; return Ē, (c, p), and v_i, (p,), for a client's labels."""
        self._flat.load(guidance)
        classes = self._guidance.classes.weight.detach().clone()
        counts = torch.bincount(labels, minlength=len(classes)).to(classes)
        return classes, counts @ classes / counts.sum().clamp_min(1)

    @override
    def client_update(
        self,
        payload: ModelAndGuidance,
        client_state: PersonalPart | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[PersonalPart, GPFLUpdate]:
        guidance, settings, training = self._guidance, self.settings, self.task.training
        rate = training.learning_rate_at(server_round)
        sent, condition = self._load(payload.guidance, data.train.labels)
        decaying = replace(training, weight_decay=settings.guidance_decay)
        optimizer = Sgd(replace(self.task, training=decaying), self._flat.tensors, rate)

        def losses(module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
            features = module.embed(inputs).float()
            personal_features = guidance.valve(features, condition)
            shared = guidance.valve(features, sent.mean(dim=0))
            cosines = functional.linear(
                functional.normalize(shared),
                functional.normalize(guidance.classes.weight),
            )
            angles = functional.cross_entropy(cosines, labels, reduction="none")
            lengths: Tensor = torch.linalg.vector_norm(shared - sent[labels], dim=1)
            of_head = head_cross_entropy(module, personal_features, labels)
            return of_head + angles + settings.magnitude_weight * lengths

        trained = local_sgd(
            self.task,
            self.joined(payload.weights, client_state),
            data.train,
            rate,
            rng,
            objective=losses,
            local_step=step_beside(self._flat, optimizer),
        )
        new_state, update = self.split(trained, len(data.train))
        return new_state, GPFLUpdate(**vars(update), guidance=self._flat.read())

    @override
    def aggregate(
        self, state: ModelAndGuidance, updates: Updates[GPFLUpdate]
    ) -> ModelAndGuidance:
        bodies, guidances = RunningMean(), RunningMean()
        for _, update in updates:
            bodies.add(update.shared, update.num_examples)
            guidances.add(update.guidance, update.num_examples)
        weights = state.weights.masked_scatter(self.shared, bodies.result())
        return ModelAndGuidance(weights, guidances.result())

    @override
    def personalize(
        self,
        payload: ModelAndGuidance,
        client_state: PersonalPart | None,
        data: ClientData,
        rng: RandomKey,
    ) -> HeadPredictor:
        part = part_in_use(client_state, data)

        def predictor_with(weights: Tensor, examples: Examples) -> HeadPredictor:
            def head(embeddings: Tensor) -> Tensor:
                if not len(examples):
                    # Without labels there is no condition.
                    return self.task.head(weights, embeddings)
                _, condition = self._load(payload.guidance, examples.labels)

                def valve(embeddings: Tensor) -> Tensor:
                    return self._guidance.valve(embeddings, condition)

                gated = self.task.in_batches(embeddings, valve, self._size)
                return self.task.head(weights, gated)

            return HeadPredictor(self.task, weights, head)

        def train(examples: Examples) -> HeadPredictor:
            _, condition = self._load(payload.guidance, examples.labels)

            def losses(module: EmbeddingModel, x: Tensor, labels: Tensor) -> Tensor:
                gated = self._guidance.valve(module.embed(x).float(), condition)
                return head_cross_entropy(module, gated.detach(), labels)

            trained = local_sgd(
                self.task,
                payload.weights,
                examples,
                self.task.first_rate,
                rng,
                num_epochs=self.unseen_epochs,
                trainable=self.personal,
                objective=losses,
            )
            return predictor_with(trained.weights, examples)

        if part is not None:
            return predictor_with(self.joined(payload.weights, part), data.train)
        return on_both_splits(data, train)

    @override
    def update_problem(
        self, payload: ModelAndGuidance, update: GPFLUpdate
    ) -> str | None:
        problem = super().update_problem(payload, update)
        return problem or wrong_shape(update, guidance=tuple(payload.guidance.shape))

    @override
    def started_from(
        self, payload: ModelAndGuidance, update: GPFLUpdate
    ) -> Mapping[str, Tensor]:
        started = super().started_from(payload, update)
        return {**started, "guidance": payload.guidance}
