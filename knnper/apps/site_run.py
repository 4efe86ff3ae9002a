"""A run over clients with data of their own."""

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict

from flwr.serverapp import Grid

from knnper.apps.order import Order
from knnper.config.document import results_identity, to_json
from knnper.config.errors import RunError
from knnper.config.sections import Experiment
from knnper.data.site.agreement import SitesSettings, SiteTask
from knnper.transport.http_grid import quick_pulls
from knnper.transport.messages import Purpose
from knnper.transport.model_folder.files import save_model
from knnper.transport.model_folder.global_model import (
    ends_with_global_model,
    global_model,
)
from knnper.transport.polling import Pace
from server.checkpoint import Checkpoint
from server.conduct import Conductor
from server.flower_federation import FlowerFederation
from server.observer import Observer
from server.roster import Member, Roster
from server.run_folder import RunFolder
from server.sites.directory import Directory
from server.sites.federation import OVER_NETWORK, SiteFederation
from server.sites.latecomers import Latecomers
from server.sites.registry import Registry
from strategies.assembly import Assembly, assemble
from strategies.experiments import without_start

MODEL = "model"
"""The folder in the run's folder that holds the trained model."""

log = logging.getLogger("flwr")


def lead_sites(grid: Grid, order: Order, observer: Observer) -> RunFolder:
    """Train and hand over; stay for those who come late; return the run's folder.

    Raises
    ------
    RunError
        If the run cannot go on.
    """
    order.require_free()
    experiment, stop = order.experiment, threading.Event()
    task = _task(experiment)
    assembly = assemble(experiment, task.spec)
    sent = without_start(experiment)
    log.info("the fingerprint of the experiment is %s", results_identity(sent))
    directory = Directory(grid, to_json(sent), lambda: Registry.read(order.registry))
    messenger = _messenger(grid, assembly, directory, stop)
    federation = SiteFederation(directory, messenger, experiment.run.federation, stop)
    folder = order.folder()
    messenger.session = folder.session()
    with folder.locked(), quick_pulls():
        roster = folder.roster() or _begin(folder, federation)
        conductor = Conductor(assembly, federation, folder, observer)
        trained = conductor.train(roster, ["flwr", "run"])
        messenger.model = _leave_model(folder, assembly, task, trained)
        conductor.hand_over(trained, roster)
        late = Latecomers(conductor, federation, trained)
        late.serve(roster, experiment.run.federation.stay_s)
    if not folder.is_finished():
        raise RunError(
            "training is done, and no client could be handed the model; the log says "
            "why of each. Resume the run when they can"
        )
    return folder


def _task(experiment: Experiment) -> SiteTask:
    agreed = experiment.data.settings
    if not isinstance(agreed, SitesSettings):
        raise TypeError(f"expected SitesSettings, found {type(agreed).__name__}")
    return agreed.task()


def _messenger(
    grid: Grid, assembly: Assembly, directory: Directory, stop: threading.Event
) -> FlowerFederation:
    settings = assembly.experiment.run.federation

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
        shared_folder="",
        stop=stop,
        paces={
            purpose: Pace(most_s, settings.round_patience)
            for purpose, most_s in (
                (Purpose.TRAIN, settings.round_timeout_s),
                (Purpose.VALIDATE, settings.round_timeout_s),
                (Purpose.PERSONALIZE, settings.hand_over_timeout_s),
            )
        },
        patience=OVER_NETWORK,
        may_be_away=True,
    )


def _begin(folder: RunFolder, federation: SiteFederation) -> Roster:
    """Wait for clients and write down who is there: the same until the run ends."""
    members = federation.gather()
    roster = Roster.of(members, _split(members))
    folder.write_roster(roster)
    log.info("clients of this run: %s", ", ".join(roster.names()))
    return roster


def _split(members: Sequence[Member]) -> str:
    known = [asdict(one) for one in sorted(members, key=lambda one: one.name)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _leave_model(
    folder: RunFolder, assembly: Assembly, task: SiteTask, trained: Checkpoint
) -> str:
    """Leave the trained model in the run's folder; return its fingerprint.

    Nothing, and an empty text, where the method ends with no model for all.
    """
    if not ends_with_global_model(assembly.experiment):
        return ""
    model = global_model(
        assembly.experiment, assembly.task, task, trained.state.weights
    )
    save_model(folder.path / MODEL, model)
    log.info("the model %s is in %s", model.fingerprint[:12], folder.path / MODEL)
    return model.fingerprint
