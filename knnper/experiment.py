"""What the sections of an experiment may choose from by name."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field

from knnper.errors import Problem

_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"

Name = Annotated[str, Field(pattern=f"^{_PATTERN}$")]
"""A field of settings that is such a name."""


def is_name(text: str) -> bool:
    """Whether ``text`` is letters, digits, ``.``, ``_``, ``-``, no sign first."""
    return re.fullmatch(_PATTERN, text) is not None


LARGEST_COUNT = 2**53
"""No client has more examples: up to here, a float holds every integer."""

PositiveInt = Annotated[int, Field(ge=1)]

NonNegativeInt = Annotated[int, Field(ge=0)]

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]

UnitInterval = Annotated[float, Field(ge=0, le=1)]  # [0, 1]

PositiveFraction = Annotated[float, Field(gt=0, le=1)]  # (0, 1]

ProperFraction = Annotated[float, Field(ge=0, lt=1)]  # [0, 1)


@dataclass(frozen=True)
class Settings:
    """Base of every settings dataclass: frozen, and unknown keys are refused."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class ConstantSchedule(Settings):
    """The learning rate stays what it is."""

    name: Literal["constant"] = "constant"

    def factor_at(self, server_round: int) -> float:  # noqa: ARG002
        """Return 1.0, the factor on the learning rate in every round."""
        return 1.0


@dataclass(frozen=True)
class MultiStepSchedule(Settings):
    """The learning rate is multiplied by ``factor`` at each milestone.

    Attributes
    ----------
    milestones
        Rounds (from 1) from which on the factor applies once more. The paper's
        CIFAR-10 runs use (100, 150) of 200 rounds (Marfoq et al. 2022, section 5).
    factor
        What the rate is multiplied with at each milestone; 0.1 in the paper.
    """

    milestones: tuple[PositiveInt, ...]
    name: Literal["multi_step"] = "multi_step"
    factor: PositiveFraction = 0.1

    def factor_at(self, server_round: int) -> float:
        """Return the factor on the learning rate in ``server_round`` (from 1)."""
        passed = sum(server_round >= milestone for milestone in self.milestones)
        return float(self.factor**passed)


Augmentation = Literal["none", "flip", "crop_flip"]

Precision = Literal["float32", "bfloat16"]

Schedule = Annotated[ConstantSchedule | MultiStepSchedule, Field(discriminator="name")]


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """How the clients train together.

    Attributes
    ----------
    num_rounds
        Communication rounds, T.
    participation
        Fraction of the seen clients with data that take part in a round, (0, 1].
    local_epochs, local_steps
        Length of a client's training in one round; give one of the two. With neither,
        one epoch.
    batch_size
        Examples in a mini-batch. The incomplete last batch is left out when there is
        a full one before it.
    learning_rate
        Local SGD's rate, η; the paper's grid is 10^-0.5 ... 10^-2.5.
    momentum, weight_decay
        Of local SGD; the momentum buffer starts from zero in every round.
    augmentation
        What happens to the images of a mini-batch at random: nothing, a horizontal
        flip, or a crop of the image in a black frame of 4 pixels and a flip.
    precision
        Of forward and backward passes, in training and in evaluation. With
        ``bfloat16`` weights and sums stay float32.
    schedule
        Factor on the learning rate as a function of the round.
    """

    num_rounds: PositiveInt = 50
    participation: PositiveFraction = 1.0
    local_epochs: PositiveInt | None = None
    local_steps: PositiveInt | None = None
    batch_size: PositiveInt = 32
    learning_rate: PositiveFloat = 0.03
    momentum: ProperFraction = 0.0
    weight_decay: NonNegativeFloat = 0.0
    augmentation: Augmentation = "none"
    precision: Precision = "float32"
    schedule: Schedule = field(default_factory=ConstantSchedule)

    def learning_rate_at(self, server_round: int) -> float:
        """Return the learning rate in ``server_round`` (from 1)."""
        return self.learning_rate * self.schedule.factor_at(server_round)


@dataclass(frozen=True)
class FederationSettings(Settings):
    """How long a run with clients on machines of their own waits for them.

    Attributes
    ----------
    min_clients
        The first round begins as soon as so many are there. With null, when all that
        are registered are there, or after ``wait_for_clients_s`` with those who came.
    wait_for_clients_s
        Longest wait for clients, at the start and before any round of whose clients
        too few are connected; then the run ends.
    grace_s
        Before a round, how long a client of it that has just been lost is waited for
        although enough others are there.
    max_share
        The largest part of a round's mean that a client gets by the number of training
        examples that it says it has: half, as much as all others together. A number
        that the operator fixed when it let the client in is taken as it is.
    round_timeout_s
        A client that has not answered after this time is left out of the round. Its
        own process ends itself then, and is free for the next one.
    round_patience
        So it is after this many times the median time of the clients in this round, or
        in one of the last five, and half a minute more, if that is earlier; or after
        three times as long as it took itself the last time, if that is later. The
        median is known once most of a round have answered.
    round_attempts
        Times that a round in which too many clients fail is made before the run ends.
    distribution_timeout_s
        Time that a client has to embed its data and to choose λ after the last round;
        less where the others need far less, as in a round.
    stay_s
        How long the server stays after the model distribution, to give the model to
        clients that come later or were offline.
    """

    min_clients: PositiveInt | None = None
    wait_for_clients_s: NonNegativeFloat = 300.0
    grace_s: NonNegativeFloat = 30.0
    max_share: PositiveFraction = 0.5
    round_timeout_s: PositiveFloat = 3600.0
    round_patience: PositiveFloat = 10.0
    round_attempts: PositiveInt = 3
    distribution_timeout_s: PositiveFloat = 3600.0
    stay_s: NonNegativeFloat = 3600.0


@dataclass(frozen=True)
class RunSettings(Settings):
    """How the experiment is carried out.

    Results depend on ``seed``, and where clients fail on ``max_failed_fraction``,
    ``max_update_norm_ratio`` and ``max_update_median_ratio``; in their last bits on
    ``threads_per_worker``, on ``evaluation_batch_size`` and on whether
    ``gpus_per_client`` is 0; on nothing else here.

    Attributes
    ----------
    seed
        Fixes partition, initial weights, participation and mini-batches.
    engine
        ``flower`` (virtual clients on Ray) or ``serial`` (one process).
    num_workers
        Worker processes of the ``flower`` engine; null is one a CPU core.
    threads_per_worker
        Threads torch may use in one worker; ``auto`` shares the usable CPU cores out
        between the workers, so that the last bits depend on both numbers.
    cpus_per_client, gpus_per_client
        What Ray reserves for a client while it works. With any part of a GPU, clients
        compute on it; else on the CPU.
    ray_address
        A Ray cluster to join, as in ``192.168.0.1:6379`` or ``auto``; null starts Ray
        on this machine. A cluster runs as many clients at a time as it has room for.
    carrier
        How models travel: ``shared_memory`` (as files in ``/dev/shm``, on one machine)
        or ``message``. ``auto`` is the former where there is room and no cluster.
    checkpoint_every
        Rounds between checkpoints. A resumed run repeats the rounds since the last.
    validate_every
        Rounds between evaluations of the unpersonalised model on the seen clients'
        validation splits; 0 is never.
    evaluation_batch_size
        Images in one forward pass where nothing is trained.
    max_failed_fraction
        A round in which a larger part of the clients fails ends the run.
    max_update_norm_ratio
        An update that differs from what the client was sent by more than this many
        times the Euclidean norm of that (plus 1) is not aggregated: it counts as a
        failure.
    max_update_median_ratio
        The same for one that differs by more than this many times the median of the
        round's updates and of the rounds before; null takes any. A client whose number
        of training examples is known to be n times the usual one may differ by √n times
        as much.
    exploding_rounds
        A training ends after so many rounds in a row in which it explodes, and names
        the last good round: their median train loss is far above the lowest one so far,
        or the median update is longer than the model. They get no checkpoint. 0 is
        never.
    keep_checkpoints
        Checkpoints that are kept: the newest two, and older ones each about twice as
        far back as the next. So are the states of clients that have one.
    federation
        What concerns clients on machines of their own alone.
    """

    seed: NonNegativeInt = 0
    engine: Literal["flower", "serial"] = "flower"
    num_workers: PositiveInt | None = None
    threads_per_worker: PositiveInt | Literal["auto"] = 1
    cpus_per_client: PositiveFloat = 1.0
    gpus_per_client: NonNegativeFloat = 0.0
    ray_address: str | None = None
    carrier: Literal["auto", "shared_memory", "message"] = "auto"
    checkpoint_every: PositiveInt = 1
    validate_every: NonNegativeInt = 0
    evaluation_batch_size: PositiveInt = 256
    max_failed_fraction: UnitInterval = 0.5
    max_update_norm_ratio: PositiveFloat = 1000.0
    max_update_median_ratio: PositiveFloat | None = 50.0
    exploding_rounds: NonNegativeInt = 3
    keep_checkpoints: PositiveInt = 6
    federation: FederationSettings = field(default_factory=FederationSettings)


S = TypeVar("S", bound=Settings, covariant=True)


@dataclass(frozen=True)
class Choice(Generic[S]):
    """Something chosen by name together with the settings it takes.

    Attributes
    ----------
    name
        The name in the catalogue, as in ``dirichlet`` or ``knn_per``.
    settings
        The validated settings of what was chosen.
    """

    name: str
    settings: S


@dataclass(frozen=True)
class Experiment:
    """One experiment, validated.

    Attributes
    ----------
    name
        Names the run folder.
    data, partition, model, method, personalization
        What was chosen by name, with its settings; ``personalization`` is what every
        client does after the last round, on top of what the method gives it.
    training, run
        See `TrainingSettings` and `RunSettings`.
    """

    name: str
    data: Choice[Settings]
    partition: Choice[Settings]
    model: Choice[Settings]
    training: TrainingSettings
    method: Choice[Settings]
    personalization: Choice[Settings]
    run: RunSettings


SettingsTypes = Mapping[str, type[Settings]]


@dataclass(frozen=True)
class Catalogue:
    """The names that exist and the settings that each takes.

    Attributes
    ----------
    data, partition, model, method
        From the names that a section accepts to the type of its other keys.
    personalization
        As these, of what can be put on top of a method.
    personalization_of
        From a method's name to that of its personalisation where none is named.
    check
        Finds what in an otherwise valid experiment does not go together.
    """

    data: SettingsTypes
    partition: SettingsTypes
    model: SettingsTypes
    method: SettingsTypes
    personalization: SettingsTypes
    personalization_of: Mapping[str, str]
    check: Callable[[Experiment], Sequence[Problem]]
