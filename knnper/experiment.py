"""The fields of an experiment: what a user chooses, with meaning, range and default.

`knnper.experiment_file` reads, checks and writes the file of an experiment.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from knnper.privacy_settings import (
    ExamplePrivacySettings,
    PrivacySettings,
    SecureAggregation,
)
from knnper.settings import (
    Choice,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ProperFraction,
    Settings,
    UnitInterval,
    is_reference,
)

Augmentation = Literal["none", "flip", "crop_flip"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class ConstantSchedule(Settings):
    """A constant learning rate."""

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
        Multiplier of the rate at each milestone; 0.1 in the paper.
    """

    milestones: tuple[PositiveInt, ...]
    name: Literal["multi_step"] = "multi_step"
    factor: PositiveFraction = 0.1

    def factor_at(self, server_round: int) -> float:
        """Return the factor on the learning rate in ``server_round`` (from 1)."""
        passed = sum(server_round >= milestone for milestone in self.milestones)
        return float(self.factor**passed)


@dataclass(frozen=True)
class DeviceSettings(Settings):
    """Speed and availability of the clients' devices in virtual time.

    Speeds and links are log-normal over the clients. Each client keeps its own in all
    rounds.

    Attributes
    ----------
    examples_per_s
        Examples per second on which the median client trains the whole model.
    speed_spread
        Ratio of the fastest to the slowest of the middle 95 % of clients; 1 makes all
        alike.
    bytes_down_per_s, bytes_up_per_s
        Speed of the median client's link. Each way carries a model; the way up is
        shortened by what ``training.compression`` saves. Null: transfers take no time.
    link_spread
        As ``speed_spread``, for the links.
    available
        Fraction of the time that a client is available, (0, 1].
    period_s
        Mean time from the start of one absence to the next. Lengths of presence and
        absence are exponential.
    trace
        CSV or JSON file of measured devices. Each client gets one of them, drawn at
        random, with the speed, link and availability that the file gives for it.
    availability_trace
        File with the availability of devices, if it is separate from ``trace``.
    """

    examples_per_s: PositiveFloat = 100.0
    speed_spread: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    bytes_down_per_s: PositiveFloat | None = None
    bytes_up_per_s: PositiveFloat | None = None
    link_spread: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    available: PositiveFraction = 1.0
    period_s: PositiveFloat = 3600.0
    trace: str | None = None
    availability_trace: str | None = None


@dataclass(frozen=True)
class SynchronousTiming(Settings):
    """The server waits for the clients of a round (Bonawitz et al. 2019).

    Attributes
    ----------
    over_selection
        Number of clients selected, as a multiple of the number needed: a round ends
        once ``participation`` of all clients have replied.
    deadline_s
        Longest duration of a round. It then ends with the replies received, or with
        the first one if there is none yet. Null: no limit.
    """

    name: Literal["synchronous"] = "synchronous"
    over_selection: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    deadline_s: PositiveFloat | None = None


@dataclass(frozen=True)
class BufferedTiming(Settings):
    """The server steps after every few replies (FedBuff, Nguyen et al. 2022).

    ``participation`` of the clients train at any time. When a client replies, another
    one starts from the model of that moment. ``num_rounds`` counts the server's steps.

    Attributes
    ----------
    buffer_size
        K, the number of replies in one step.
    staleness_exponent
        a of the factor (1 + τ)^-a on a client's update, where τ is the number of steps
        made while the client trained.
    server_rate
        η of the server, a factor on all updates.
    """

    name: Literal["buffered"] = "buffered"
    buffer_size: PositiveInt = 10
    staleness_exponent: NonNegativeFloat = 0.5
    server_rate: PositiveFloat = 1.0


@dataclass(frozen=True)
class UniformSelection(Settings):
    """All available clients are equally likely."""

    name: Literal["uniform"] = "uniform"


@dataclass(frozen=True)
class UtilitySelection(Settings):
    """Sample clients by utility per second (Oort; Lai et al. 2021).

    Attributes
    ----------
    exploration, exploration_decay, min_exploration
        ε, the fraction of the first round's clients that are drawn uniformly, the
        factor on it in each further round, and its smallest value. 1, 1 is ``uniform``.
    staleness_weight
        b of the bonus sqrt(b ln R / L) in round R of a client that took part last in
        round L.
    preferred_quantile, straggler_exponent
        Used with ``devices``. T is the round time that this fraction of the clients
        does not exceed; α gives the factor (T / t)^α on the utility of a client that
        needs t > T.
    """

    name: Literal["utility"] = "utility"
    exploration: UnitInterval = 0.9
    exploration_decay: PositiveFraction = 0.98
    min_exploration: UnitInterval = 0.2
    staleness_weight: NonNegativeFloat = 0.1
    preferred_quantile: UnitInterval = 0.3
    straggler_exponent: NonNegativeFloat = 2.0


Selection = Annotated[UniformSelection | UtilitySelection, Field(discriminator="name")]
Timing = Annotated[SynchronousTiming | BufferedTiming, Field(discriminator="name")]
Schedule = Annotated[ConstantSchedule | MultiStepSchedule, Field(discriminator="name")]


@dataclass(frozen=True)
class SgdSettings(Settings):
    """Settings of SGD beside momentum and weight decay.

    Attributes
    ----------
    dampening, nesterov
        As in ``torch.optim.SGD``.
    """

    dampening: NonNegativeFloat = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """Federated training: rounds, participation, local optimisation.

    Attributes
    ----------
    num_rounds
        Communication rounds, T.
    participation
        Fraction of the seen clients with data that take part in a round, (0, 1].
    local_epochs, local_steps
        Length of a client's training in one round; set one of the two. With neither,
        one epoch.
    batch_size
        Examples in a mini-batch. The incomplete last batch is dropped if there is a
        full one before it.
    learning_rate
        Local SGD's rate, η; the paper's grid is 10^-0.5 ... 10^-2.5.
    momentum, weight_decay
        Of local SGD; the momentum buffer starts from zero in every round.
    augmentation
        Random change of the images of a mini-batch: ``none``, a horizontal ``flip``, or
        ``crop_flip``, a crop of the image in a black frame of 4 pixels and a flip.
    precision
        Of forward and backward passes, in training and in evaluation. With
        ``bfloat16`` weights and sums stay float32. ``auto`` is for simulations: it
        times steps in both on this machine at the start and takes the faster.
    schedule
        Factor on the learning rate as a function of the round.
    optimizer
        An optimiser of torch by its name with its settings, such as ``{name: AdamW,
        eps: 1e-6}``, or your own. Its state starts empty in every round. SGD takes
        ``momentum`` and ``weight_decay`` of this section, any other its own.
    loss
        ``cross_entropy``, or your own function ``(logits (n, c), labels (n,)) ->``
        the loss of each example (n,), or their mean. A class, such as
        ``torch.nn:MultiMarginLoss``, is first instantiated with its settings.
    class_weights
        Factor on the loss of an example by its label: one for each label, or
        ``balanced``, inverse to the frequency of the label at a client; null is 1.
    clip_norm
        Largest Euclidean norm of the loss's gradient; longer gradients are scaled to
        it. Null: no limit.
    example_privacy
        Noise on the gradients of local training, which makes each example of a client
        private; null: none.
    compression
        Compression of the clients' updates: ``top_k``, ``quantize`` or ``sign`` with
        its settings, such as ``{name: top_k, fraction: 0.01}``, or your own; null
        sends every number in four bytes.
    devices
        Speed and availability of clients in virtual time; null: no virtual time.
    timing
        ``synchronous``: the server waits for the clients of a round. ``buffered``: it
        updates the model after every few replies.
    selection
        Sampling of a round's clients: ``uniform``, or by ``utility`` per second.
    secure_aggregation
        ``secagg_plus`` or ``pairwise``: the server learns the sum of a round's updates
        and no single update. Null: it receives the updates.
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
    precision: Precision | Literal["auto"] = "float32"
    schedule: Schedule = field(default_factory=ConstantSchedule)
    optimizer: Choice[Settings] = field(default=Choice("SGD", SgdSettings()))
    loss: Choice[Settings] = field(default=Choice("cross_entropy", Settings()))
    class_weights: Literal["balanced"] | tuple[NonNegativeFloat, ...] | None = None
    clip_norm: PositiveFloat | None = None
    example_privacy: ExamplePrivacySettings | None = None
    compression: Choice[Settings] | None = None
    devices: DeviceSettings | None = None
    timing: Timing = SynchronousTiming()
    selection: Selection = UniformSelection()
    secure_aggregation: SecureAggregation | None = None

    def learning_rate_at(self, server_round: int, base: float | None = None) -> float:
        """Return the learning rate in a round (from 1); ``base`` replaces the rate."""
        rate = self.learning_rate if base is None else base
        return rate * self.schedule.factor_at(server_round)


@dataclass(frozen=True)
class FederationSettings(Settings):
    """Waiting times and limits of a run with clients on other machines.

    Attributes
    ----------
    min_clients
        Number of connected clients at which the first round begins. Null: it begins
        when all registered clients are connected, or after ``wait_for_clients_s`` with
        the clients connected by then.
    wait_for_clients_s
        Longest wait for clients at the start, and before a round with too few connected
        clients. The run then ends.
    grace_s
        Before a round, how long to wait for a client that has just disconnected,
        although enough others are connected.
    max_share
        Largest weight of a client in a round's mean that its own claim of training
        examples gives it: half, as much as all others together. Numbers that the
        operator fixed on registration are not limited.
    max_weight_ratio
        The same limit in multiples of the round's median number of training examples,
        so that several clients together gain little by false claims. Null: no limit.
    clip_median_ratio
        Updates longer than this multiple of the median of the round, or of the last
        rounds, are scaled down to it; null: never. Updates of virtual clients are never
        scaled.
    round_timeout_s
        Time limit of a client's reply. A later client is left out of the round, and its
        training process ends, which frees it for the next round.
    round_patience
        A client times out after this multiple of the median response time (of this
        round or any of the last five) + 30 s, but never before 3 times its own last
        response time. The median is known once most clients of a round have replied.
    round_attempts
        Attempts at a round in which too many clients fail before the run ends.
    distribution_timeout_s
        Time limit of a client for embedding its data and choosing λ after the last
        round; less if the other clients need far less, as in a round.
    stay_s
        How long the server stays up after the model distribution to serve the model to
        offline and new clients.
    """

    min_clients: PositiveInt | None = None
    wait_for_clients_s: NonNegativeFloat = 300.0
    grace_s: NonNegativeFloat = 30.0
    max_share: PositiveFraction = 0.5
    max_weight_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = 2.0
    clip_median_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = 2.0
    round_timeout_s: PositiveFloat = 3600.0
    round_patience: PositiveFloat = 10.0
    round_attempts: PositiveInt = 3
    distribution_timeout_s: PositiveFloat = 3600.0
    stay_s: NonNegativeFloat = 3600.0


@dataclass(frozen=True)
class RunSettings(Settings):
    """Execution of the experiment.

    Results depend on ``seed`` and ``metrics``, and where clients fail on
    ``max_failed_fraction``, ``max_update_norm_ratio`` and ``max_update_median_ratio``.
    Their last bits depend on ``threads_per_worker``, ``evaluation_batch_size`` and
    whether ``gpus_per_client`` is 0. No other setting of this section changes them.

    Attributes
    ----------
    seed
        Fixes partition, initial weights, participation and mini-batches.
    engine
        ``flower`` (virtual clients on Ray) or ``serial`` (one process).
    num_workers
        Worker processes of the ``flower`` engine; null: one per CPU core.
    threads_per_worker
        Threads of torch in one worker. ``auto`` divides the usable CPU cores by the
        number of workers, so that the last bits depend on both numbers.
    cpus_per_client, gpus_per_client
        Resources that Ray reserves for a client while it works. With any fraction of a
        GPU clients compute on it, otherwise on the CPU.
    ray_address
        A Ray cluster to join, as in ``192.168.0.1:6379`` or ``auto``; null starts Ray
        on this machine. A cluster runs as many clients at a time as it has room for.
    carrier
        Transport of models: ``shared_memory`` (files in ``/dev/shm``, on one machine),
        ``object_store`` (Ray's; each machine of a cluster fetches a round's model once)
        or ``message`` (inside each message; models below 128 kB always travel so
        instead of in files). ``auto`` is the first if there is room and no cluster,
        otherwise the second.
    checkpoint_every
        Rounds between checkpoints. A resumed run repeats the rounds since the last.
    validate_every
        Rounds between evaluations on the seen clients' validation splits; 0 is never.
    validate_personal
        Whether these evaluations include the personalised models. Each seen client then
        personalises twice: each half of its validation split is predicted with the
        settings chosen on the other half.
    metrics
        Metrics on the clients' test splits beside those of every run:
        ``balanced_accuracy``, ``macro_f1`` and ``auroc``, or your own functions
        ``(labels (n,), probabilities (n, c)) -> float``, higher being better. Each
        metric listed, also ``log_loss`` or ``ece``, is reported with its spread over
        the clients.
    save_predictions
        Whether to save the probabilities of each test example in
        ``predictions.parquet``; a site saves its own in its state folder. Requires
        ``knnper[tables]``.
    evaluation_batch_size
        Images in one forward pass outside training.
    max_failed_fraction
        Largest fraction of a round's clients that may fail; above it the run ends.
    max_update_norm_ratio
        Longest update that is aggregated, as a multiple of the Euclidean norm of the
        model sent (plus 1). A longer one counts as a failure.
    max_update_median_ratio
        The same as a multiple of the median of the round's updates and of the rounds
        before; null: no limit. A client that is known to have n times the usual number
        of training examples may send an update √n times as long.
    exploding_rounds
        Number of exploding rounds in a row that end the run, with the last good round
        in the message. A round explodes if its median train loss is far above the
        lowest so far, or its median update is longer than the model; it gets no
        checkpoint. 0 is never.
    keep_checkpoints
        Checkpoints to keep: the newest two, and older checkpoints, each about twice as
        far back as the next. States of clients are kept likewise.
    federation
        Settings for clients on other machines.
    """

    seed: NonNegativeInt = 0
    engine: Literal["flower", "serial"] = "flower"
    num_workers: PositiveInt | None = None
    threads_per_worker: PositiveInt | Literal["auto"] = 1
    cpus_per_client: PositiveFloat = 1.0
    gpus_per_client: NonNegativeFloat = 0.0
    ray_address: str | None = None
    carrier: Literal["auto", "shared_memory", "object_store", "message"] = "auto"
    checkpoint_every: PositiveInt = 1
    validate_every: NonNegativeInt = 0
    validate_personal: bool = True
    metrics: tuple[Choice[Settings], ...] = ()
    save_predictions: bool = False
    evaluation_batch_size: PositiveInt = 256
    max_failed_fraction: UnitInterval = 0.5
    max_update_norm_ratio: PositiveFloat = 1000.0
    max_update_median_ratio: PositiveFloat | None = 50.0
    exploding_rounds: NonNegativeInt = 3
    keep_checkpoints: PositiveInt = 6
    federation: FederationSettings = field(default_factory=FederationSettings)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the `metrics` in results."""
        return tuple(metric.metric_name for metric in self.metrics)


@dataclass(frozen=True)
class Experiment:
    """One experiment, validated.

    Attributes
    ----------
    name
        Name of the run folder.
    data, partition, model, method, personalization
        Entries of the catalogue, or the user's code, with their settings.
        ``personalization`` runs at every client after the last round, on top of the
        method.
    training, run
        See `TrainingSettings` and `RunSettings`.
    own_code
        Folder that is searched for ``module:attribute`` before the Python path. In a
        file it is relative to that file, by default the file's folder. Documents sent
        to other machines hold fingerprints instead, by reference.
    privacy
        See `PrivacySettings`; None for no differential privacy.
    """

    name: str
    data: Choice[Settings]
    partition: Choice[Settings]
    model: Choice[Settings]
    training: TrainingSettings
    method: Choice[Settings]
    personalization: Choice[Settings]
    run: RunSettings
    own_code: str | None = None
    privacy: PrivacySettings | None = None
    # The memory's eviction policy if it is the user's code. The section personalization
    # names it, so that it is no section of its own and not compared.
    policy: Choice[Settings] | None = field(default=None, compare=False)

    def own(self) -> Mapping[str, Choice[Settings]]:
        """Return the parts of the experiment that are the user's code, by section."""
        training = self.training
        chosen = {
            **{name: getattr(self, name) for name in SECTIONS},
            "training.optimizer": training.optimizer,
            "training.loss": training.loss,
            "training.compression": training.compression,
            **{
                f"run.metrics.{metric.metric_name}": metric
                for metric in self.run.metrics
            },
            "personalization.store.policy": self.policy,
        }
        return {
            place: reference
            for place, reference in chosen.items()
            if isinstance(reference, Choice) and is_reference(reference.name)
        }


SECTIONS = tuple(
    field.name for field in dataclasses.fields(Experiment) if field.compare
)


def is_timed_by_clients(training: TrainingSettings) -> bool:
    """Return whether the order of steps depends on when real clients reply."""
    return training.devices is None and training.timing != SynchronousTiming()
