"""Bringing a model and a site's data together: onboard, join a federation, refresh."""

import contextlib
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import torch

from knnper.client.activation import node_process
from knnper.client.data_changes import DataChanges
from knnper.client.node import NodeOptions, run_client
from knnper.client.node_log import log_to_stderr
from knnper.client.settings import ClientSettings
from knnper.client.site import state_of
from knnper.client.site_state import SiteState
from knnper.client.state import Serving, SiteStateError, pending_serving
from knnper.data.site import open_site
from knnper.data.site_data import SiteData
from knnper.errors import KnnPerError, RunError
from knnper.lifeline import die_with_parent
from knnper.strategies.core.exported_model import GlobalModel
from knnper.transport.waiting import FIRST_REMINDER_S, Reminder, duration

POLL_S = 0.2
_ORDERLY_END_S = 5.0
_REPORT_S = 60.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Onboarded:
    """A client that has a model to serve.

    Attributes
    ----------
    took_part
        Whether the model is taken as trained on this site's data; None if the server
        knows.
    was_served
        Whether the model was installed before.
    """

    site_state: SiteState
    serving: Serving
    took_part: bool | None = None
    was_served: bool = False


def onboard(
    settings: ClientSettings, model: GlobalModel, *, took_part: bool | None = None
) -> Onboarded:
    """Install ``model`` with the client's own data; nothing leaves the machine."""
    site_state = SiteState(settings.state, settings.name, door=settings.door)
    # As in the run: the last bits depend on the number of threads.
    torch.set_num_threads(model.card.num_threads)
    data = open_site(settings.data, settings.base, model.card.learned, settings.cache)
    if took_part is None:
        # A site that lost its state looks like a new one: it may be trained on.
        took_part = settings.train
    decided = site_state.install(model, data, took_part=took_part)
    return Onboarded(site_state, decided.serving, took_part)


@dataclass(frozen=True)
class Refreshed:
    """The outcome of a refresh; ``serving`` is unchanged if there were no changes."""

    site_state: SiteState
    changes: DataChanges
    serving: Serving


@dataclass(frozen=True)
class Compared:
    """A client's data, how it differs from the memory, and the model it is for."""

    changes: DataChanges
    data: SiteData
    model: GlobalModel


def read_changes(settings: ClientSettings, site_state: SiteState) -> Compared | None:
    """Compare a client's data with its memory; return None without a model."""
    # A pending installation is the next to be served.
    serving = pending_serving(site_state.folder) or site_state.served()
    if serving is None:
        return None
    model = site_state.load(serving.model)
    data = open_site(settings.data, settings.base, model.card.learned, settings.cache)
    return Compared(site_state.changes(data), data, model)


def refresh(
    settings: ClientSettings,
    *,
    forget_vanished: bool = False,
    only_look: bool = False,
) -> Refreshed:
    """Bring a client's memory up to date with its data, by the model that is served.

    Only new examples are embedded, and λ is chosen again. An interrupted call can be
    repeated. A running service loads the outcome within a second.

    Parameters
    ----------
    forget_vanished
        Delete examples that are no longer in the data.
    only_look
        Compare, and change nothing.
    """
    site_state = SiteState(settings.state, settings.name, door=settings.door)
    if not only_look:
        site_state.finish()
    compared = read_changes(settings, site_state)
    serving = site_state.served()
    if compared is None or serving is None:
        raise SiteStateError(
            f"nothing is installed in {settings.state} yet; wait for the federation's "
            "model, or run knnper site onboard"
        )
    changes, model = compared.changes, compared.model
    is_forgetting = forget_vanished and changes.vanished
    if only_look or not (
        is_forgetting or changes.new or changes.changed or changes.tested
    ):
        return Refreshed(site_state, changes, serving)
    torch.set_num_threads(model.card.num_threads)
    decided = site_state.install(
        model,
        compared.data,
        took_part=serving.took_part,
        forget_vanished=forget_vanished,
    )
    return Refreshed(site_state, changes, decided.serving)


def join(
    settings: ClientSettings, patience_s: float, *, app: str, verbose: bool = False
) -> Onboarded:
    """Run a node of the federation until it has distributed a model.

    ``app`` is the installed ClientApp, ``MODULE:NAME``.
    """
    site_state = state_of(settings)
    began = time.monotonic()
    reminder = Reminder()
    if (serving := site_state.served()) is not None:
        return Onboarded(site_state, serving, was_served=True)
    with _running_node(settings, site_state, patience_s, app, verbose) as node:
        while True:
            # Read first: the node may install the model and end in between.
            has_ended = node is not None and node.exitcode is not None
            if (serving := site_state.served()) is not None:
                return Onboarded(site_state, serving)
            if has_ended:
                raise RunError(
                    "the node ended before it received a model; its log has the "
                    "reason, and knnper site doctor looks for the cause"
                )
            waited_s = time.monotonic() - began
            if waited_s >= FIRST_REMINDER_S and reminder.is_due("no model"):
                log.info(
                    "waiting for the server to distribute a model, %s of at most %s",
                    duration(waited_s),
                    duration(patience_s),
                )
            if waited_s >= patience_s:
                raise SiteStateError(
                    f"the server distributed no model within {patience_s:g} s; have it "
                    "do so (knnper fed submit FEDERATION --resume RUN --stay S), or "
                    "give --model"
                )
            time.sleep(POLL_S)


@contextlib.contextmanager
def _running_node(
    settings: ClientSettings,
    site_state: SiteState,
    patience_s: float,
    app: str,
    verbose: bool,
) -> Iterator[BaseProcess | None]:
    """Run the client's node in another process; yield None where one runs already."""
    if node_process(settings.state) is not None:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    node = context.Process(
        target=_run_node, args=(settings, patience_s, app, verbose, os.getpid())
    )
    node.start()
    try:
        yield node
    finally:
        # It ends once the server knows that the model has arrived.
        if site_state.served() is not None:
            node.join(_REPORT_S)
        node.terminate()
        node.join(_ORDERLY_END_S)
        if node.exitcode is None:
            node.kill()
            node.join()


def _run_node(
    settings: ClientSettings, patience_s: float, app: str, verbose: bool, parent: int
) -> None:
    die_with_parent(parent)
    log_to_stderr(verbose=verbose)
    try:
        site_state = state_of(settings)
        options = NodeOptions(
            app=app,
            patience_s=patience_s,
            is_done=lambda: site_state.served() is not None,
            verbose=verbose,
        )
        run_client(settings, options)
    except KnnPerError as error:
        sys.exit(f"Error: {error}")
