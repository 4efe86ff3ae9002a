"""Flower's ServerApp and ClientApp, for simulations and real clients."""

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from knnper.audit_log import AuditLog, Recorder, record_nothing
from knnper.client.client_app import make_client_app
from knnper.client.flower_node import quick_pulls
from knnper.client.site import CONFIG, SiteNode
from knnper.data.site_task import SitesSettings, SiteTask
from knnper.errors import ConfigError, HarmlessFormatter, KnnPerError, Problem, RunError
from knnper.experiment import Experiment, is_timed_by_clients
from knnper.experiment_file import from_json, read_experiment
from knnper.files import parse_json
from knnper.models import with_local_files
from knnper.own import Door
from knnper.process import with_fixed_threads
from knnper.server.checkpoints import Checkpoint
from knnper.server.directory import Directory
from knnper.server.flower_federation import FlowerFederation
from knnper.server.late_clients import LateClients
from knnper.server.link.authorized import read_roster
from knnper.server.link.submission import RUN_ENDED
from knnper.server.link.superlink import (
    LOG_LAYOUT,
    SERVER_FILE_VARIABLE,
    WARNINGS_VARIABLE,
)
from knnper.server.observer import LoggingObserver, Observer
from knnper.server.roster import Roster
from knnper.server.run import Conductor
from knnper.server.run_folder import RunFolder
from knnper.server.settings import read_server
from knnper.server.sites import OVER_NETWORK, SiteFederation
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.experiments import find_experiment
from knnper.simulation.flower_engine import VirtualNode, carrier_of, flower_federation
from knnper.simulation.label_counts import keep_label_counts
from knnper.simulation.reports.accuracy_table import tables_of_run
from knnper.simulation.reports.table import Table
from knnper.simulation.trained_model import MODEL
from knnper.simulation.workbench import open_workbench
from knnper.strategies.catalogue import for_sites, identity_at_sites
from knnper.strategies.core.assembly import Assembly, assemble
from knnper.strategies.core.exported_model import (
    ends_with_global_model,
    global_model,
    save_model,
)
from knnper.transport.messages import Purpose
from knnper.transport.polling import Pace, announce

log = logging.getLogger("flwr")

# The node of a site if a client is configured, else of a simulation.
client_app = make_client_app(
    lambda context: SiteNode() if CONFIG in context.node_config else VirtualNode()
)
server_app = ServerApp()


@dataclass(frozen=True)
class Order:
    """A run to start or resume."""

    experiment: Experiment
    output: Path
    overwrite: bool
    resume: bool
    registry: Path | None

    def require_free(self) -> None:
        """Reject a folder that is taken."""
        if not self.resume:
            RunFolder.require_free(self.output, overwrite=self.overwrite)

    def folder(self) -> RunFolder:
        """Return the run's folder, new or resumed."""
        if self.resume:
            return RunFolder.open(self.output)
        return RunFolder.create(self.output, self.experiment, overwrite=self.overwrite)


def order_of(run_config: Mapping[str, object], door: Door | None = None) -> Order:
    """Parse Flower's run configuration.

    The relative path of an experiment starts from the app's folder, which Flower puts
    on ``sys.path``; any other name is that of a shipped experiment. A resumed run has
    its recorded experiment, changed by ``set``.

    ``door`` opens users' code; by default that of the server that started this process.
    """
    changes = _changes(str(run_config["set"]))
    resume = bool(run_config["resume"])
    output = str(run_config["output"])
    registry = str(run_config["registry"])
    # A server of this project admits code by its settings; otherwise the app's folder.
    file = os.environ.get(SERVER_FILE_VARIABLE)
    if door is None and file is not None:
        door = read_server(Path(file)).door
    catalogue = experiment_catalogue(Door if door is None else lambda _: door)
    if resume:
        place = _absolute(output)
        experiment = RunFolder.open(place).experiment(catalogue, changes)
    else:
        if document := str(run_config["document"]):
            described = from_json(document, catalogue, changes)
        else:
            name = str(run_config["experiment"])
            places = (Path(folder, name) for folder in sys.path)
            path = next(filter(Path.is_file, places), None) or find_experiment(name)
            described = read_experiment(path, catalogue, changes)
        experiment = with_fixed_threads(described)
        place = _absolute(output or f"runs/{experiment.name}")
    if door is not None:
        experiment = replace(
            experiment, model=with_local_files(experiment.model, door, only_local=False)
        )
    return Order(
        experiment=experiment,
        output=place,
        overwrite=bool(run_config["overwrite"]),
        resume=resume,
        registry=_absolute(registry) if registry else None,
    )


def _changes(text: str) -> Sequence[str]:
    """Return the overrides in ``text``: joined by ``;``, or a JSON list."""
    if not text.startswith("["):
        return [part for part in text.split(";") if part]
    try:
        changes = parse_json(text)
    except ValueError:
        changes = None
    if isinstance(changes, list) and all(isinstance(change, str) for change in changes):
        return changes
    message = f'found {text!r}, expected KEY=VALUE;KEY=VALUE or ["KEY=VALUE", ...]'
    raise ConfigError([Problem("set", message)], "the run configuration")


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()


def prepare(order: Order) -> tuple[SiteTask, Assembly]:
    """Return the task and the assembly of a run over sites; reject invalid runs."""
    order.require_free()
    task = _task(order.experiment)
    return task, assemble(order.experiment, task.spec)


def lead_sites(
    grid: Grid, order: Order, observer: Observer, record: Recorder = record_nothing
) -> RunFolder:
    """Train, distribute the model, and wait for late clients; return the folder."""
    task, assembly = prepare(order)
    experiment = order.experiment
    stop = threading.Event()
    registry = order.registry
    identity = identity_at_sites(assembly.experiment)
    log.info("the fingerprint of the experiment is %s", identity)
    name = order.output.name
    record("run_begins", name=name, experiment=identity, resumed=order.resume)
    directory = Directory(
        grid,
        for_sites(assembly.experiment),
        lambda: read_roster(registry) if registry else {},
        record,
    )
    messenger = _messenger(grid, assembly, directory, stop)
    federation = SiteFederation(directory, messenger, experiment.run.federation, stop)
    folder = order.folder()
    messenger.session = folder.session()
    with folder.locked(), quick_pulls():
        roster = folder.roster() or _begin(folder, federation)
        conductor = Conductor(assembly, federation, folder, observer)
        trained = conductor.train(roster, ["flwr", "run"])
        messenger.model = _save_trained_model(folder, assembly, task, trained)
        record("trained", model=messenger.model, rounds=trained.server_round)
        conductor.distribute(trained, roster)
        late = LateClients(conductor, federation, trained)
        late.serve(roster, experiment.run.federation.stay_s)
    if not folder.is_finished():
        raise RunError(
            "training is done, but no client received the model; see the log for the "
            "reasons. Resume the run when clients are online"
        )
    return folder


def _task(experiment: Experiment) -> SiteTask:
    agreed = experiment.data.settings
    if not isinstance(agreed, SitesSettings):
        raise RunError(
            f"expected data that stays with the sites, found {experiment.data.name}: "
            "the run was simulated; resume it with knnper simulate"
        )
    return agreed.task()


def _messenger(
    grid: Grid, assembly: Assembly, directory: Directory, stop: threading.Event
) -> FlowerFederation:
    settings = assembly.experiment.run.federation
    is_late_welcome = is_timed_by_clients(assembly.experiment.training)
    train_patience = math.inf if is_late_welcome else settings.round_patience

    def node_of(client: str) -> int:
        node = directory.node_of(client)
        if node is None:
            raise RunError(f"client {client} is not connected")
        return node

    return FlowerFederation(
        grid=grid,
        choose_node=node_of,
        update_type=assembly.method.update_type,
        experiment=directory.experiment,
        run_folder="",
        stop=stop,
        paces={
            Purpose.TRAIN: Pace(settings.round_timeout_s, train_patience),
            Purpose.VALIDATE: Pace(settings.round_timeout_s, settings.round_patience),
            Purpose.SECURE: Pace(settings.round_timeout_s, settings.round_patience),
            Purpose.PERSONALIZE: Pace(
                settings.distribution_timeout_s, settings.round_patience
            ),
        },
        patience=OVER_NETWORK,
        may_be_away=True,
    )


def _begin(folder: RunFolder, federation: SiteFederation) -> Roster:
    """Wait for clients and record the roster of the run."""
    members = federation.gather()
    known = [
        asdict(member) for member in sorted(members, key=lambda member: member.name)
    ]
    split = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    roster = Roster.of(members, split)
    folder.write_roster(roster)
    log.info("clients of this run: %s", ", ".join(roster.names()))
    return roster


def _save_trained_model(
    folder: RunFolder, assembly: Assembly, task: SiteTask, trained: Checkpoint
) -> str:
    """Save the trained model in the run's folder; return its fingerprint."""
    if not ends_with_global_model(assembly.experiment):
        return ""
    model = global_model(
        assembly.experiment, assembly.task, task, trained.state.weights
    )
    save_model(folder.path / MODEL, model)
    log.info("the model %s is in %s", model.fingerprint[:12], folder.path / MODEL)
    return model.fingerprint


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment of the run configuration."""
    announce()
    with _warning_the_server():
        order = order_of(context.run_config)
        record = _recorder(context.run_id)
        observer = LoggingObserver(log, record)
        try:
            if isinstance(order.experiment.data.settings, SitesSettings):
                folder = lead_sites(grid, order, observer, record)
            else:
                folder = lead_virtual_clients(grid, order, observer)
        finally:
            observer.finished()
    for cells in tables_of_run(folder.path):
        log.info("\n%s", Table.of_cells(folder.path.name, cells).as_markdown())
    log.info("all files of this run are in %s", folder.path)


def _recorder(run: int) -> Recorder:
    """Return the recorder of a run's server; it does nothing without a server."""
    file = os.environ.get(SERVER_FILE_VARIABLE)
    if file is None:
        return record_nothing
    audit_log = AuditLog.of(read_server(Path(file)).state)
    return functools.partial(audit_log.append, run=run)


@contextlib.contextmanager
def _warning_the_server() -> Iterator[None]:
    """Copy warnings of this run to the log of its server."""
    descriptor = os.environ.get(WARNINGS_VARIABLE)
    if not descriptor:
        yield
        return
    # Not closed at the end: the process may run several ServerApps in tests.
    file = logging.StreamHandler(os.fdopen(int(descriptor), "w", closefd=False))
    file.setFormatter(HarmlessFormatter(LOG_LAYOUT))
    file.setLevel(logging.WARNING)
    root = logging.getLogger()
    # Python writes warnings to stderr only if there is no other handler.
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    added: list[tuple[logging.Logger, logging.Handler]] = [
        (root, console),
        (root, file),
    ]
    if not log.propagate:
        added.append((log, file))
    for logger, handler in added:
        logger.addHandler(handler)
    try:
        yield
    except KnnPerError as error:
        log.error("%s: %s", RUN_ENDED, error)
        raise
    finally:
        for logger, handler in added:
            logger.removeHandler(handler)
        file.close()


def lead_virtual_clients(grid: Grid, order: Order, observer: Observer) -> RunFolder:
    """Run virtual clients over a central data set; return the run's folder."""
    order.require_free()
    bench = open_workbench(order.experiment)
    folder = replace(order, experiment=bench.experiment).folder()
    with folder.locked(), carrier_of(order.experiment.run) as carrier:
        keep_label_counts(bench.clients, folder.path)
        federation = flower_federation(
            grid, bench, folder.path, carrier, threading.Event()
        )
        conductor = Conductor(bench, federation, folder, observer)
        conductor.lead(bench.roster, ["flwr", "run"])
    return folder
