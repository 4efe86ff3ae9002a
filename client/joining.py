"""A client that gets its first model from the federation."""

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

from client.node.lock import is_locked
from client.node.logs import log_to_stderr
from client.node.node import NodeOptions, run_client
from client.onboarding import POLL_S, Onboarded
from client.residence.errors import ResidenceError
from client.residence.residence import Residence
from client.settings import ClientSettings
from client.site.keeper import residence_of
from knnper.config.errors import KnnPerError, RunError
from knnper.lifeline import die_with_parent

_ORDERLY_END_S = 5.0
_REPORT_S = 60.0


def join(
    settings: ClientSettings, patience_s: float, *, verbose: bool = False
) -> Onboarded:
    """Be a node of the federation until it has handed over a model.

    Where the client's node runs already, it is that which gets the model. A model that
    was handed over before is enough.

    Parameters
    ----------
    settings
        The client.
    patience_s
        How long to wait for the server's model.
    verbose
        Whether what Flower says of every message is logged, too.

    Raises
    ------
    RunError
        If the node cannot stay in the federation; its log, on standard error, says
        why.
    ResidenceError
        If there is no model in time, or the state folder is another client's.
    """
    residence = residence_of(settings)
    deadline = time.monotonic() + patience_s
    serving = residence.served()
    with (
        contextlib.nullcontext()
        if serving
        else _node(settings, residence, patience_s, verbose) as node
    ):
        while serving is None:
            has_ended = node is not None and node.exitcode is not None
            if has_ended and residence.served() is None:
                raise RunError(
                    "the client's node has ended before it was handed a model; its "
                    "log says why, and knnper doctor looks for the cause"
                )
            if time.monotonic() >= deadline:
                raise ResidenceError(
                    f"the server handed over no model within {patience_s:g} s. It does "
                    "so after a run, and as long as run.federation.stay_s says: knnper "
                    "submit --resume RUN --stay SECONDS on the server. Or onboard with "
                    "an exported model: knnper onboard --model FOLDER"
                )
            time.sleep(POLL_S)
            serving = residence.served()
    return Onboarded(residence, serving)


@contextlib.contextmanager
def _node(
    settings: ClientSettings, residence: Residence, patience_s: float, verbose: bool
) -> Iterator[BaseProcess | None]:
    """Run the client's node in a process of its own; None where it runs already."""
    if is_locked(settings.state):
        yield None
        return
    context = multiprocessing.get_context("spawn")
    arguments = (settings, patience_s, verbose, os.getpid())
    node = context.Process(target=_be_node, args=arguments)
    node.start()
    try:
        yield node
    finally:
        # It leaves by itself once the server knows that the model has arrived.
        if residence.served() is not None:
            node.join(_REPORT_S)
        node.terminate()
        node.join(_ORDERLY_END_S)
        if node.exitcode is None:
            node.kill()
            node.join()


def _be_node(
    settings: ClientSettings, patience_s: float, verbose: bool, parent: int
) -> None:
    die_with_parent(parent)
    log_to_stderr(verbose=verbose)
    try:
        residence = residence_of(settings)
        options = NodeOptions(
            patience_s=patience_s,
            is_done=lambda: residence.served() is not None,
            verbose=verbose,
        )
        run_client(settings, options)
    except KnnPerError as error:
        sys.exit(f"Error: {error}")
