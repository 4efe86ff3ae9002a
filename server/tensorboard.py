"""Per-round figures as curves for TensorBoard."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from server.observer import RoundRecord


@contextlib.contextmanager
def scalar_writer(
    folder: Path, first_round: int
) -> Iterator[Callable[[RoundRecord], None]]:
    """Yield a function that adds the figures of one round to the curves.

    Parameters
    ----------
    folder
        Where the event files are; the curves of a resumed run go on.
    first_round
        Curves that an interrupted run left from this round on are not shown.
    """
    # Loading it takes seconds, which only the process that leads a run should wait.
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=first_round)

    def write(record: RoundRecord) -> None:
        for name, value in record.items():
            if name not in ("server_round", "failures"):
                writer.add_scalar(name, value, record["server_round"])

    try:
        yield write
    finally:
        writer.close()
