"""A run over virtual clients, led through Flower's own command."""

import threading

from flwr.serverapp import Grid

from knnper.apps.order import Order
from server.conduct import Conductor
from server.observer import Observer
from server.run_folder import RunFolder
from simulation.flower_engine import carrier_folder, flower_federation
from simulation.label_counts import keep_label_counts
from simulation.workbench import open_workbench


def lead_virtual_clients(grid: Grid, order: Order, observer: Observer) -> RunFolder:
    """Lead the clients that a central data set is dealt to; return the run's folder."""
    order.require_free()
    bench = open_workbench(order.experiment)
    folder = order.folder()
    with folder.locked(), carrier_folder(order.experiment.run) as shared:
        keep_label_counts(bench.clients, folder.path)
        federation = flower_federation(
            grid, bench, folder.path, shared, threading.Event()
        )
        conductor = Conductor(bench, federation, folder, observer)
        conductor.lead(bench.roster, ["flwr", "run"])
    return folder
