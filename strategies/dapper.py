"""Dapper: fine-tuning on a mixture of the client's own data and the server's.

Mansour, Mohri, Ro, Suresh, "Three Approaches for Personalization with Applications to
Federated Learning", 2020, section 5, appendix D.2 and Figure 3. A client with m_k
examples D_k receives a sample D_g of r m_k examples of the server. For each λ of a
cover of [0, 1] it starts from the served model and minimises

    λ L_{D_k}(h) + (1 - λ) L_{D_g}(h)                                     (Eq. 9)

by SGD, where each element of a mini-batch comes from D_k with probability λ, otherwise
from D_g. It then takes the λ with the best model on its validation split.

With λ = 1 this is fine-tuning in every bit; with λ = 0 it is a model trained on D_g
alone for as many steps. Of equally good λ the largest wins, which depends least on the
server's data; a client without validation data takes λ = 1. With the chosen λ the
client trains once more, on both splits, and serves that model.

Departures from the paper:

- The paper samples D_g from the data of all clients, and appendix D.3 suggests proxy
  data if these may not leave them. Here D_g is proxy data:
  ``partition.proxy_fraction`` of the training data belongs to the server. It is sent
  with the last model only.
- The copy of the paper at hand lacks the formulas; they are those of the original.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.augmentation import AUGMENTATIONS
from knnper.data.examples import ClientData, Examples, InputSpec, no_examples
from knnper.data.site_task import SitesSettings
from knnper.errors import Problem, RunError
from knnper.experiment import Experiment
from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat, PositiveInt, Settings
from knnper.strategies.core.averaging import Updates
from knnper.strategies.core.evaluation import evaluate
from knnper.strategies.core.method import Method, Personalizer
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import Batch, LocalModel, LocalStep, local_sgd
from knnper.strategies.fine_tuning import one_model
from knnper.strategies.mapper import Cover


@dataclass(frozen=True)
class DapperSettings(Settings):
    """The mixture of the two data sets, and the training on it.

    Attributes
    ----------
    client_shares
        The values of λ that a client chooses from, the share of its own data, in
        [0, 1] and all different. Each costs one training.
    sample_factor
        r, the number of the server's examples as a multiple of the client's; 0.1 to 10.
    most_sampled
        The most examples that the server sends to one client.
    num_epochs
        The number of steps, in passes over the client's own data; 1 in the paper.
    learning_rate
        Learning rate of the fine-tuning; null is the training section's rate in the
        last round. 0.04 in the paper.
    """

    client_shares: Cover = (0.0, 0.25, 0.5, 0.75, 1.0)
    sample_factor: PositiveFloat = 1.0
    most_sampled: PositiveInt = 1000
    num_epochs: PositiveInt = 1
    learning_rate: PositiveFloat | None = None


@dataclass(frozen=True)
class Sample(Record):
    """Examples of the server; float32 holds their values exactly."""

    images: Tensor  # shape (n, height, width, channels), not scaled
    labels: Tensor  # shape (n,)


class Dapper(Personalizer):
    """The served model, fine-tuned on the client's data and the server's."""

    title = "Dapper"
    source = "Mansour et al. 2020, section 5, Figure 3"
    unseen = "trains on with its own data and the server's like any other client"
    chooses_on_validation = True
    needs_one_model = True
    needs_proxy = True
    trains = True

    settings: DapperSettings

    def __init__(self, task: Task, method: Method, settings: DapperSettings) -> None:
        super().__init__(task, method, settings)
        # Any, since mypy checks the hash of a class as that of its instances.
        inner: Any = method
        kinds = (inner.state_type, inner.payload_type)
        self.state_type = extended(kinds[0], "DapperState", "rounds_made", int)
        self.payload_type = extended(kinds[1], "DapperPayload", "sample", Sample | None)

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> Record:
        state = self.method.init(clients, rng)
        return with_field(self.state_type, state, rounds_made=0)

    @override
    def broadcast(self, state: Any, client_id: str, rng: RandomKey) -> Record:
        payload = self.method.broadcast(state, client_id, rng)
        sample = None
        if state.rounds_made >= self.method.num_rounds:
            most = self.settings.most_sampled
            sample = draw_sample(self.task, most, rng.child("sample"))
        return with_field(self.payload_type, payload, sample=sample)

    @override
    def aggregate(self, state: Any, updates: Updates[Any]) -> Record:
        after = self.method.aggregate(state, updates)
        return with_field(self.state_type, after, rounds_made=state.rounds_made + 1)

    @override
    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        base = one_model(self.method.personalize(payload, client_state, data, rng))
        num_own = data.num_examples
        if num_own == 0:
            return base
        count = max(1, round(self.settings.sample_factor * num_own))
        proxy = draw_proxy(payload.sample, self.task.spec, count, rng.child("taken"))

        def alone(share: float) -> ModelPredictor:
            before = base.without_validation()
            return self._trained(before, data.train, proxy, share, rng)

        # Without examples of the server only λ = 1 is possible.
        cover = sorted(self.settings.client_shares) if len(proxy) else [1.0]
        share = cover[-1]
        if len(cover) > 1 and len(data.validation) > 0:
            # The smallest log-loss; ties go to the largest λ.
            share = min(
                reversed(cover),
                key=lambda candidate: (
                    evaluate(alone(candidate), data.validation).log_loss_sum
                ),
            )
        both = self._trained(base, data.train_and_validation(), proxy, share, rng)
        return replace(both, trained_alone=lambda: alone(share))

    def _trained(
        self,
        base: ModelPredictor,
        client_data: Examples,
        proxy: Examples,
        share: float,
        rng: RandomKey,
    ) -> ModelPredictor:
        weights = local_sgd(
            base.task,
            base.weights,
            client_data,
            self.settings.learning_rate or self.task.last_rate,
            rng,
            num_epochs=self.settings.num_epochs,
            local_step=_mixing_step(base.task, proxy, share, rng.child("proxy")),
        ).weights
        chosen = {**base.chosen, "client_share": share}
        return replace(base, weights=weights, chosen=chosen, trained_alone=None)

    @staticmethod
    @override
    def check(settings: DapperSettings, experiment: Experiment) -> Sequence[Problem]:
        if not isinstance(experiment.data.settings, SitesSettings):
            return ()
        message = (
            "found dapper with data that stays with the sites, where the server has no "
            "examples to sample from; expected a personalization that needs none, such "
            "as fine_tuning, which is dapper with client_shares [1]"
        )
        return (Problem("personalization.name", message),)


def _mixing_step(
    task: Task, proxy: Examples, share: float, rng: RandomKey
) -> LocalStep:
    """Return a step with each example from the client with probability λ."""
    generator = rng.numpy()
    device = task.model.device
    augment = AUGMENTATIONS[task.training.augmentation]

    def mixed(client_batch: Examples) -> Examples:
        foreign = torch.from_numpy(generator.random(len(client_batch)) >= share)
        where = torch.from_numpy(generator.integers(0, len(proxy), len(client_batch)))
        proxy_batch = proxy.take(where[foreign])
        is_foreign = foreign.to(device)
        images, labels = client_batch.images.clone(), client_batch.labels.clone()
        images[is_foreign] = augment(proxy_batch.images.to(device), generator)
        labels[is_foreign] = proxy_batch.labels.to(device)
        return Examples(images, labels)

    def step(model: LocalModel) -> Tensor:
        batch = model.next_batch()
        if share < 1.0:
            batch = Batch(mixed(batch.examples), None)
        loss = model.backward(batch)
        model.step()
        return loss

    return step


@functools.cache  # so that equal arguments give the same type
def extended(base: Any, name: str, new: str, of_type: Any) -> type[Record]:
    """Return a subclass of a record type with one more field."""
    if new in {member.name for member in fields(base)}:
        raise ValueError(f"{base.__name__} already has a field {new!r}; rename one")
    # Keyword-only, since fields of the base may have defaults.
    extra = (new, of_type, field(kw_only=True))
    namespace = {"__module__": __name__}
    return make_dataclass(
        name, [extra], bases=(base,), namespace=namespace, frozen=True
    )


def with_field(record_type: type[Record], base: Record, **new: Any) -> Record:
    """Convert ``base`` to a record of an `extended` type, with its ``new`` field."""
    names = [member.name for member in fields(record_type) if member.name not in new]
    return record_type(**{name: getattr(base, name) for name in names}, **new)


def draw_sample(task: Task, most: int, rng: RandomKey) -> Sample:
    """Draw ``most`` of the server's examples, or all if there are fewer."""
    proxy = no_examples(task.spec) if task.proxy is None else task.proxy()
    if len(proxy) == 0:
        raise RunError(
            "dapper sends a sample of the server's examples to clients, and the server "
            "has none; expected partition.proxy_fraction above 0, or another "
            "personalization, such as fine_tuning"
        )
    drawn = _some(proxy, most, rng)
    return Sample(drawn.images.float(), drawn.labels.float())


def draw_proxy(
    sample: Sample | None, spec: InputSpec, count: int, rng: RandomKey
) -> Examples:
    """Draw ``count`` examples of a sample, or all if there are fewer."""
    if sample is None:
        return no_examples(spec)
    images = sample.images.to(spec.torch_dtype)
    return _some(Examples(images, sample.labels.to(torch.int64)), count, rng)


def _some(examples: Examples, count: int, rng: RandomKey) -> Examples:
    positions = rng.numpy().permutation(len(examples))[:count]
    return examples.take(torch.from_numpy(np.sort(positions)))
