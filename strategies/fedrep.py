"""FedRep: a shared body, and a personal head that each client trains first.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for
Personalized Federated Learning", ICML 2021, Algorithm 1; a baseline of Marfoq et al.
2022 (section 5). A participant i with the body φ of the server and its head h_i

    h_i ← SGD on f_i(·, φ), a few epochs, φ fixed
    φ_i ← SGD on f_i(h_i, ·) from φ, h_i fixed

sends φ_i, and the server takes their mean. After the last round every client, seen or
unseen, trains its head on the final body.

Departures from the paper:

- The mean weights clients by their examples, so that FedRep with an empty head is
  FedAvg; the paper weights clients equally.
- Algorithm 1 ends with the last round. The final training of the heads, on both splits,
  is added, because the body changes while a client is not sampled.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat, PositiveInt, Settings
from knnper.strategies.core.final_training import trained_on_both_splits
from knnper.strategies.core.predictors import Predictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.sharing import (
    PartlyShared,
    PersonalPart,
    SharedUpdate,
    part_in_use,
)
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import (
    LocalResult,
    Objective,
    cross_entropy,
    local_sgd,
)


@dataclass(frozen=True)
class FedRepSettings(Settings):
    """The training of a client's head.

    Attributes
    ----------
    head_epochs
        τ_h, passes over its data in which a client trains its head, in each round
        before the body and once more after the last round; 10 in the paper. The
        training section sets how long the body is trained.
    head_learning_rate
        α of the head; Marfoq et al. 2022 tunes it apart from the body's (section 5).
        Null is the training section's. Either is multiplied by the schedule's factor:
        that of the round, after the last round that of the last round, and for a new
        head that of the first.
    unseen_epochs
        Passes of an unseen client, with a new head, after the last round.
    """

    head_epochs: PositiveInt = 10
    head_learning_rate: PositiveFloat | None = None
    unseen_epochs: PositiveInt = 10


def head_then_body(
    task: Task,
    weights: Tensor,
    examples: Examples,
    server_round: int,
    rng: RandomKey,
    *,
    head_rate: float | None,
    head_epochs: int,
    objective: Objective = cross_entropy,
) -> LocalResult:
    """Train the head, then the body under it.

    Parameters
    ----------
    head_rate
        Learning rate of the head; None is the training section's.
    head_epochs
        Passes over the examples that train the head.
    objective
        Of the body.
    """
    head = task.head_mask
    with_new_head = local_sgd(
        task,
        weights,
        examples,
        task.training.learning_rate_at(server_round, head_rate),
        rng.child("personal"),
        num_epochs=head_epochs,
        trainable=head,
    )
    return local_sgd(
        task,
        with_new_head.weights,
        examples,
        task.training.learning_rate_at(server_round),
        rng,
        trainable=~head,
        objective=objective,
    )


class FedRep(PartlyShared):
    """A shared body, trained under personal heads that stay with each client."""

    title = "FedRep"
    source = "Collins et al. 2021, Algorithm 1; Marfoq et al. 2022 section 5"
    upload = "< 1 (all but the head)"
    client_state = "< 1 (the head)"
    unseen = "trains its own head on the shared body"
    learns_from_validation = "all"
    trains_unseen_from_start = True
    reference_title = None

    settings: FedRepSettings

    def __init__(self, task: Task, settings: FedRepSettings) -> None:
        self._head = task.head_mask
        super().__init__(task, settings, ~self._head, settings.unseen_epochs)

    @override
    def client_update(
        self,
        payload: ModelPayload,
        client_state: PersonalPart | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[PersonalPart, SharedUpdate]:
        trained = head_then_body(
            self.task,
            self.joined(payload.weights, client_state),
            data.train,
            server_round,
            rng,
            head_rate=self.settings.head_learning_rate,
            head_epochs=self.settings.head_epochs,
        )
        return self.split(trained, len(data.train))

    @override
    def personalize(
        self,
        payload: ModelPayload,
        client_state: PersonalPart | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Predictor:
        part = part_in_use(client_state, data)
        epochs, rate_of = self.settings.head_epochs, self.task.training.num_rounds
        if part is None:
            epochs, rate_of = self.settings.unseen_epochs, 1
        head_rate = self.settings.head_learning_rate
        return trained_on_both_splits(
            self.task,
            self.joined(payload.weights, part),
            data,
            rng,
            num_epochs=epochs,
            learning_rate=self.task.training.learning_rate_at(rate_of, head_rate),
            trainable=self._head,
        )
