"""The ServerApp: leads virtual clients, or those that sites start."""

import contextlib
import logging
import os
from collections.abc import Iterator

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from knnper.apps.order import Order, order_of
from knnper.apps.site_run import lead_sites
from knnper.config.errors import KnnPerError
from knnper.data.site.agreement import SitesSettings
from server.link.log_file import WARNINGS_VARIABLE
from server.observer import LoggingObserver
from server.run_folder import RunFolder
from simulation.reporting.runs import load_run
from simulation.reporting.table import as_cells, table_of_run
from simulation.showing import Table

# Flower shows, and streams to `flwr run --stream`, what is written to this log.
log = logging.getLogger("flwr")

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run configuration names.

    The same server and clients as `knnper simulate` leads; results are the same.
    """
    with _warning_the_server():
        order = order_of(context.run_config)
        observer = LoggingObserver(log)
        try:
            folder = _lead(grid, order, observer)
        finally:
            observer.finished()
    cells = as_cells(table_of_run(load_run(folder.path)))
    log.info("\n%s", Table.of_cells(folder.path.name, cells).as_markdown())
    log.info("everything about this run is in %s", folder.path)


@contextlib.contextmanager
def _warning_the_server() -> Iterator[None]:
    """Let the log of the server that this run belongs to have its warnings, too.

    What else a run says is in Flower's database alone.
    """
    path = os.environ.get(WARNINGS_VARIABLE)
    if not path:
        yield
        return
    file = logging.FileHandler(path, encoding="utf-8", delay=True)
    file.setLevel(logging.WARNING)
    root = logging.getLogger()
    # What Python does by itself only where nobody else writes.
    own = logging.StreamHandler()
    own.setLevel(logging.WARNING)
    added = ((root, own), (root, file), (log, file))
    for logger, handler in added:
        logger.addHandler(handler)
    try:
        yield
    except KnnPerError as error:
        log.error("the run has ended: %s", error)
        raise
    finally:
        for logger, handler in added:
            logger.removeHandler(handler)
        file.close()


def _lead(grid: Grid, order: Order, observer: LoggingObserver) -> RunFolder:
    if isinstance(order.experiment.data.settings, SitesSettings):
        return lead_sites(grid, order, observer)
    # It needs Ray, which the server of a federation need not have.
    from knnper.apps.virtual_run import lead_virtual_clients

    return lead_virtual_clients(grid, order, observer)
