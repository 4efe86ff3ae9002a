"""A site as a Flower node: its experiment, its data, and what it keeps of a run."""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict

import knnper
from knnper.audit_log import AuditLog
from knnper.client.deadline import Deadline
from knnper.client.limits import Limits, note_refusal
from knnper.client.runtime import Personalized, Served
from knnper.client.secure_sums import SecureSums
from knnper.client.settings import ClientSettings, LimitSettings, read_client
from knnper.client.site_privacy import protected_updates, require_no_buffers
from knnper.client.site_runtime import MetricsPolicy, SiteRuntime, require_own_name
from knnper.client.site_state import SiteState
from knnper.client.state_store import ClientStateStore
from knnper.data.examples import ClientData, Examples
from knnper.data.site import open_site
from knnper.data.site_data import SiteData
from knnper.data.site_task import SitesSettings, SiteTask
from knnper.datastore.memory import KnnSettings
from knnper.errors import (
    ConfigError,
    KnnPerError,
    RefusedError,
    RunError,
    text_for_others,
)
from knnper.experiment import Experiment
from knnper.experiment_file import from_json, results_identity
from knnper.files import make_private
from knnper.metrics import computations
from knnper.models import build_model, with_local_files
from knnper.own import Door, explained
from knnper.predictions import RunPredictions, require_arrow
from knnper.privacy import system_noise
from knnper.process import compute_device, keep_freed_memory
from knnper.reasons import Code, SafeReason
from knnper.secure.messages import SecureReply, SecureRequest
from knnper.seeding import RandomKey
from knnper.settings import dotted, plain
from knnper.strategies.catalogue import KINDS, site_catalogue, title_of
from knnper.strategies.core.assembly import (
    Assembly,
    assemble_with_task,
    task_of_experiment,
)
from knnper.strategies.core.exported_model import (
    ModelError,
    ends_with_global_model,
    global_model,
    require_fingerprint,
)
from knnper.strategies.core.frozen import digest_of, embedded_examples, of_embeddings
from knnper.strategies.core.task import Task
from knnper.transport.credentials import fingerprint, read_node_key, replaced_keys
from knnper.transport.flower_protocol import APP_FAILED
from knnper.transport.messages import (
    IN_MESSAGE,
    Carrier,
    Introduction,
    Job,
    introduction_content,
)

CONFIG = "config"  # key of a node's configuration that names the client's file
KEPT = 4  # runs that can be resumed: their client states are kept
_OWN_CODE_SETTINGS = {f"{section}.name" for section in KINDS}

log = logging.getLogger("flwr")


def state_of(settings: ClientSettings) -> SiteState:
    """Open a client's state folder, which belongs to its name and key alone."""
    if settings.key is None:
        return SiteState(settings.state, settings.name, door=settings.door)
    return SiteState(
        settings.state,
        settings.name,
        fingerprint(read_node_key(settings.key).public_key()),
        settings.door,
        replaced_keys(settings.key),
    )


def installer_of(
    settings: ClientSettings, assembly: Assembly, data: SiteData, expected: str
) -> Callable[[Personalized], Served | None]:
    """Return a function that installs a distributed model, for `ClientRuntime.keep`.

    ``expected`` is the fingerprint that the server announced, or "" for none.
    """
    experiment = assembly.experiment
    # The server decides by the same rule, so that clients that wait for a model get it.
    has_model = bool(expected) and ends_with_global_model(experiment)

    def install(personalized: Personalized) -> Served | None:
        if not has_model:
            log.warning("the method ends with no global model, so nothing is served")
            return None
        weights = personalized.reference.weights
        model = global_model(experiment, assembly.task, data.task, weights)
        try:
            require_fingerprint(
                model, expected, "the model that the server distributed"
            )
        except ModelError as error:
            note_refusal(settings.state, "model", str(error))
            raise
        decided = state_of(settings).install(model, data, took_part=personalized.seen)
        log.info(
            "the model %s is installed, with a weight of %g for the neighbours",
            model.fingerprint[:12],
            decided.serving.knn_weight,
        )
        chosen = experiment.personalization
        if (
            isinstance(chosen.settings, KnnSettings)
            and assembly.method.serves_global_model
        ):
            return Served(decided.mixed, decided.global_model, decided.chosen)
        log.warning(
            "the reported figures are of %s; the served model is the global one with "
            "a memory",
            title_of(experiment.method.name, chosen.name),
        )
        return None

    return install


def run_states(state: Path, experiment: Experiment, session: str) -> Path:
    """Return the folder of a run's client states; remove the folders of old runs."""
    if not re.fullmatch(r"[A-Za-z0-9-]{0,64}", session):
        raise RunError(
            "expected a session of at most 64 letters, digits and -, found "
            f"{session[:80]!r}",
            reason=SafeReason(Code.BAD_REQUEST),
        )
    folder = state / "runs" / f"{results_identity(experiment)[:16]}-{session}"
    if folder.exists():
        folder.touch()
    others = [path for path in folder.parent.glob("*") if path != folder]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for old in others[KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


@dataclass(frozen=True)
class _SiteSource:
    """The data of the one client of this process."""

    site: SiteData
    train: bool
    embed: Callable[[Examples], Examples] = lambda examples: examples

    def data(self, client: str) -> ClientData:  # noqa: ARG002 (there is only one)
        splits = self.site.client_data()
        return ClientData(self.embed(splits.train), self.embed(splits.validation))

    def test(self, client: str) -> Examples:  # noqa: ARG002
        return self.embed(self.site.test.examples)

    def test_names(self, client: str) -> Sequence[str]:  # noqa: ARG002
        return self.site.test.names

    def class_weights(self, client: str) -> None:
        """Return None: a site's own test examples all count the same."""

    def is_seen(self, client: str) -> bool:  # noqa: ARG002
        return self.train


def _embeddings_folder(cache: Path, data: SiteData) -> Path:
    """Return the folder of this data's embeddings; remove those of earlier data."""
    splits = (data.train, data.validation, data.test)
    digests = [digest_of(split.examples.images.numpy()) for split in splits]
    name = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
    root = cache / "embeddings"
    for other in root.glob("*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)
    return root / name


class SiteNode:
    """A `Node` with one client and its own data, which answers one message."""

    def __init__(self) -> None:
        # Of the message, for the audit log.
        self._details: dict[str, object] = {"outcome": "answered"}

    def open(self, context: Context, job: Job) -> SiteRuntime:
        """Read the site's data and bind the job's method to it."""
        deadline = Deadline.after(job.timeout_s)
        settings = _settings(context)
        metrics_policy = MetricsPolicy(settings.share_metrics)
        # The site's own code may read the data, and may hang.
        with deadline.ends("reading the data"):
            experiment, limits = self._allowed(settings, job, context.run_id)
            data, task = site_data(settings, experiment)
            trained: list[tuple[int, float]] = []
            whole, learned = _task_to_learn(experiment, task)
            learned = dataclasses.replace(
                learned,
                on_trained=lambda steps, examples: trained.append((steps, examples)),
                noise_source=system_noise,
            )
            protect = functools.partial(
                protected_updates, learned, settings.limits.privacy, experiment.privacy
            )
            assembly = assemble_with_task(experiment, learned, protect)
            source = _SiteSource(data, job.seen and settings.train)
            if learned.spec != whole.spec:
                embed = functools.partial(
                    embedded_examples,
                    task=whole,
                    model=experiment.model,
                    spec=learned.spec,
                    root=_embeddings_folder(settings.cache, data),
                )
                source = dataclasses.replace(source, embed=embed)
            keep_freed_memory()
            states = run_states(settings.state, experiment, job.session)
            saves_predictions = experiment.run.save_predictions
            return SiteRuntime(
                method=assembly.method,
                spec=learned.spec,
                source=source,
                states=ClientStateStore(states),
                key=assembly.key,
                pool=assembly.task.pool,
                keep=installer_of(
                    settings, dataclasses.replace(assembly, task=whole), data, job.model
                ),
                metrics=computations(experiment.run.metrics),
                predictions=RunPredictions(states) if saves_predictions else None,
                explain=functools.partial(self._explain, metrics_policy),
                secure_sums=SecureSums(experiment.training.secure_aggregation, states),
                name=settings.name,
                deadline=deadline,
                metrics_policy=metrics_policy,
                limits=limits,
                num_train=len(data.train),
                trained=trained,
            )

    def exchange_secrets(
        self, context: Context, job: Job, request: SecureRequest
    ) -> SecureReply:
        """Reply to a stage of secure aggregation; the data is not read for it."""
        settings = _settings(context)
        experiment, _ = self._allowed(settings, job, context.run_id)
        require_own_name(job.clients, settings.name)
        states = run_states(settings.state, experiment, job.session)
        secure_sums = SecureSums(experiment.training.secure_aggregation, states)
        return secure_sums.answer(job.clients, request)

    def carrier(self, context: Context, job: Job) -> Carrier:  # noqa: ARG002
        """Return vectors in messages: the server is on another machine."""
        return IN_MESSAGE

    def introduce(self, context: Context, job: Job | None) -> RecordDict:
        """Return the client's name, the sizes of its splits, or why it is not ready."""
        settings = _settings(context)
        name, train = settings.name, settings.train
        if job is None:
            return introduction_content(Introduction(name, train))
        try:
            experiment, limits = self._allowed(settings, job, context.run_id)
            data, task = site_data(settings, experiment)
            limits.require_plan(len(data.train))
            require_model(experiment, task, limits)
        except Exception as error:  # noqa: BLE001 (the site's own code may raise any)
            policy = MetricsPolicy(settings.share_metrics)
            problem = self._explain(policy, error, "reading the data")
            return introduction_content(Introduction(name, train, problem=problem))
        remark = limits.without_training(len(data.train)) if train else None
        if remark is not None:
            log.warning("%s", remark)
        shares_sizes = settings.share_metrics
        introduction = Introduction(
            name=name,
            train=train and remark is None,
            num_train=settings.fixed_weight or len(data.train),
            num_validation=len(data.validation) if shares_sizes else 0,
            num_test=len(data.test) if shares_sizes else 0,
            remark=str(remark or ""),
        )
        return introduction_content(introduction)

    def refused(self, context: Context, reason: str) -> None:
        """Record and log that the server refuses this client."""
        settings = _settings(context)
        self._details |= {"outcome": "refused by the server", "reason": reason}
        if note_refusal(settings.state, "client", reason):
            log.error(
                "the server refuses this client: %s. Once that is fixed, the server "
                "asks again",
                reason,
            )

    def answered(self, message: Message, context: Context) -> None:
        """Record the message in the audit log: without an entry no answer leaves."""
        settings = _settings(context)
        defaults = dict(dotted(plain(LimitSettings())))
        limits = {
            name: value
            for name, value in dotted(plain(settings.limits))
            if value != defaults.get(name)
        }
        AuditLog.of(settings.state).append(
            "message",
            server=settings.server,
            run=context.run_id,
            purpose=message.metadata.message_type,
            version=knnper.__version__,
            train=settings.train,
            share_metrics=settings.share_metrics,
            limits=limits,
            **self._details,
        )

    def failed(self, message: Message, context: Context, error: Exception) -> Message:
        """Reply with the codes of an error; its text stays here."""
        metrics_policy = MetricsPolicy(share_metrics=False)
        # The error may be one of the file in which `share_metrics` is set.
        with contextlib.suppress(KnnPerError, OSError):
            metrics_policy = MetricsPolicy(_settings(context).share_metrics)
        kind = message.metadata.message_type
        activity = f"answering a message ({kind})"
        reason = self._explain(metrics_policy, error, activity)
        with contextlib.suppress(KnnPerError, OSError):
            self.answered(message, context)
        return Message(Error(APP_FAILED, reason), reply_to=message)

    def _allowed(
        self, settings: ClientSettings, job: Job, run: int
    ) -> tuple[Experiment, Limits]:
        """Read the experiment of a job, and reject it if the limits exclude it."""
        self._details["round"] = job.server_round
        experiment = site_experiment(job.experiment, settings.door)
        limits = Limits(settings, experiment, run)
        self._details |= {
            "experiment": limits.fingerprint,
            "method": experiment.method.name,
            "model": experiment.model.name,
        }
        limits.require_allowed()
        if experiment.run.save_predictions:
            require_arrow()
        return experiment, limits

    def _explain(
        self,
        metrics_policy: MetricsPolicy,
        error: Exception,
        activity: str = "personalization",
    ) -> str:
        """Note an error for the audit log; return its text for the server."""
        self._details |= {
            "outcome": "refused" if isinstance(error, RefusedError) else "failed",
            "reason": text_for_others(error),
        }
        return metrics_policy.explain(error, activity)


def site_experiment(text: str, door: Door) -> Experiment:
    """Parse a job's experiment; the site's own code and files replace their names."""
    try:
        experiment = from_json(text, site_catalogue(door))
    except ConfigError as error:
        if all(problem.place in _OWN_CODE_SETTINGS for problem in error.problems):
            raise RunError(f"the experiment cannot be run here: {error}") from error
        raise RunError(
            "this client has data of its own, and the experiment is not one over data "
            "that stays with the sites; submit it with `knnper fed submit`. If it was, "
            f"the two sides run different versions: {error}",
            reason=SafeReason(Code.NOT_FOR_SITES),
        ) from error
    return dataclasses.replace(
        experiment, model=with_local_files(experiment.model, door)
    )


@explained()
def require_model(experiment: Experiment, task: SiteTask, limits: Limits) -> None:
    """Reject a model that the site cannot build from its files and code, or protect."""
    chosen = experiment.model
    if limits.client.train and limits.privacy_budget is not None:
        require_no_buffers(_task_to_learn(experiment, task)[1].model)
    elif chosen.entry is not None or getattr(chosen.settings, "frozen", None):
        # Frozen weights without a file are drawn from the seed.
        key = RandomKey(experiment.run.seed).child("model")
        build_model(chosen, task.spec, key)


def _task_to_learn(experiment: Experiment, task: SiteTask) -> tuple[Task, Task]:
    """Return the task of the whole model, and that of its part that is trained."""
    whole = task_of_experiment(experiment, task.spec, compute_device(experiment.run))
    return whole, of_embeddings(whole)


def site_data(
    settings: ClientSettings, experiment: Experiment
) -> tuple[SiteData, SiteTask]:
    """Read the site's data for the task of an experiment."""
    agreed = experiment.data.settings
    if not isinstance(agreed, SitesSettings):
        raise TypeError(f"expected SitesSettings, found {type(agreed).__name__}")
    task = agreed.task()
    make_private(settings.state)  # it caches the decoded data
    return open_site(settings.data, settings.base, task, settings.cache), task


def _settings(context: Context) -> ClientSettings:
    path = context.node_config.get(CONFIG)
    if not isinstance(path, str):
        raise RunError(
            "expected the path of the client's file as 'config' in the node's "
            "configuration, found none; start the node with `knnper fed client`, or "
            "with flower-supernode --node-config 'config=\"/path/to/client.yaml\"'"
        )
    return read_client(Path(path))
