"""The node of one site: from its configuration file to a player of its client."""

import logging
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, RecordDict

from client.node.deadline import Deadline
from client.runtime import ClientRuntime
from client.settings import ClientSettings, read_client
from client.site.discretion import Discretion
from client.site.keeper import keeper_of
from client.site.limits import Limits
from client.site.player import SitePlayer
from client.site.refusals import note_refusal
from client.site.run_states import run_states
from client.state_store import ClientStateStore
from knnper.config.document import from_json
from knnper.config.errors import KnnPerError, RunError
from knnper.config.sections import Experiment
from knnper.data.examples import ClientData, Examples
from knnper.data.site.agreement import SitesSettings, SiteTask
from knnper.data.site.catalogue import open_site
from knnper.data.site.site_data import SiteData
from knnper.machine import compute_device, keep_freed_memory
from knnper.private_folders import make_private
from knnper.transport.introduction import Introduction, introduction_content
from knnper.transport.messages import Job
from strategies.assembly import assemble
from strategies.experiments import site_catalogue

CONFIG = "config"
"""The key of a node's configuration that names the client's file."""

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class SiteSource:
    """The data of the only client of this process.

    Attributes
    ----------
    site
        All of its data.
    train
        Whether it takes part in training.
    """

    site: SiteData
    train: bool

    def data(self, client: str) -> ClientData:  # noqa: ARG002 (there is one)
        """Return what the client learns from."""
        return self.site.client_data()

    def test(self, client: str) -> Examples:  # noqa: ARG002
        """Return the test split."""
        return self.site.test.examples

    def class_weights(self, client: str) -> None:
        """Return None: a site's own test examples all count the same."""

    def is_seen(self, client: str) -> bool:  # noqa: ARG002
        """Return whether the client takes part in training."""
        return self.train


class SiteHost:
    """A node with one client, whose data lies at the site."""

    def open(self, context: Context, job: Job) -> SitePlayer:
        """See `client.app.Host`."""
        deadline = Deadline.after(job.timeout_s)
        settings = _settings(context)
        discretion = Discretion(settings.share_metrics)
        what = "reading the data"
        # The owner's code may be what reads it, and may hang.
        with discretion.around(what), deadline.ends(what):
            experiment = site_experiment(job.experiment)
            limits = Limits(settings, experiment, context.run_id)
            limits.require_allowed()
            data, task = site_data(settings, experiment)
            trained: list[tuple[int, float]] = []
            runtime = _runtime(settings, job, experiment, data, task, trained)
        return SitePlayer(
            settings.name,
            runtime,
            deadline,
            discretion,
            limits,
            len(data.train),
            trained,
        )

    def carrier_folder(self, context: Context, job: Job) -> Path | None:  # noqa: ARG002
        """See `client.app.Host`: the server is on another machine."""
        return None

    def introduce(self, context: Context, job: Job | None) -> RecordDict:
        """Return the client's name and the sizes of its splits."""
        settings = _settings(context)
        return introduction_content(_introduction(settings, job, context.run_id))

    def refused(self, context: Context, reason: str) -> None:
        """See `client.app.Host`."""
        settings = _settings(context)
        if note_refusal(settings.state, "client", reason):
            log.error(
                "the server refuses this client: %s. It stays connected and takes part "
                "in nothing until that is mended; the server asks again by itself",
                reason,
            )


def site_experiment(text: str) -> Experiment:
    """Return the experiment that a job is for.

    Raises
    ------
    RunError
        If its data does not stay with the sites, or this version does not know it.
    """
    try:
        return from_json(text, site_catalogue())
    except KnnPerError as error:
        raise RunError(
            "this client has data of its own, and the experiment is not one over data "
            "that stays with the sites; submit it with `knnper submit`. If it was, the "
            f"two sides run different versions: {error}"
        ) from error


def site_data(
    settings: ClientSettings, experiment: Experiment
) -> tuple[SiteData, SiteTask]:
    """Return the site's data as the experiment needs it.

    Raises
    ------
    DataError
        If it does not fit.
    OSError
        If the state folder cannot be made.
    """
    agreed = experiment.data.settings
    if not isinstance(agreed, SitesSettings):
        raise TypeError(f"expected SitesSettings, found {type(agreed).__name__}")
    task = agreed.task()
    # What is read is kept there for the next time.
    make_private(settings.state)
    return open_site(settings.data, settings.base, task, settings.cache), task


def _runtime(
    settings: ClientSettings,
    job: Job,
    experiment: Experiment,
    data: SiteData,
    task: SiteTask,
    trained: list[tuple[int, float]],
) -> ClientRuntime:
    assembly = assemble(
        experiment,
        task.spec,
        compute_device(experiment.run),
        on_trained=lambda *found: trained.append(found),
    )
    keep_freed_memory()
    return ClientRuntime(
        method=assembly.method,
        spec=task.spec,
        source=SiteSource(data, job.seen and settings.train),
        states=ClientStateStore(run_states(settings.state, experiment, job.session)),
        key=assembly.key,
        pool=assembly.task.pool,
        keep=keeper_of(settings, assembly, data, job.model),
    )


def _introduction(settings: ClientSettings, job: Job | None, run: int) -> Introduction:
    if job is None:
        return Introduction(settings.name, settings.train)
    discretion = Discretion(settings.share_metrics)
    try:
        with discretion.around("reading the data"):
            experiment = site_experiment(job.experiment)
            limits = Limits(settings, experiment, run)
            limits.require_allowed()
            data, _ = site_data(settings, experiment)
            limits.require_plan(len(data.train))
    except RunError as error:
        return Introduction(settings.name, settings.train, problem=str(error))
    remark = limits.without_training(len(data.train)) if settings.train else ""
    if remark:
        log.warning("%s", remark)
    is_told = settings.share_metrics
    return Introduction(
        name=settings.name,
        train=settings.train and not remark,
        num_train=len(data.train),
        num_validation=len(data.validation) if is_told else 0,
        num_test=len(data.test) if is_told else 0,
        remark=remark,
    )


def _settings(context: Context) -> ClientSettings:
    path = context.node_config.get(CONFIG)
    if not isinstance(path, str):
        raise RunError(
            f"expected the path of the client's file as {CONFIG!r} in the node's "
            "configuration, found none; start the node with `knnper client`, or with "
            "flower-supernode --node-config 'config=\"/path/to/client.yaml\"'"
        )
    return read_client(Path(path))
