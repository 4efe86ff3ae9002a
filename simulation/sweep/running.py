"""A sweep from its plan to its runs; what is there is not made again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simulation.batch.earlier_training import with_earlier_training
from simulation.batch.families import by_seed, families_of, require_same_inputs
from simulation.batch.folder import Identity, batch_folder
from simulation.batch.playing import Family, is_done
from simulation.batch.progress import Advance, Progress, Tracker
from simulation.batch.workers import play_side_by_side
from simulation.sweep.plan import Point, Sweep

COMMAND = ("knnper", "sweep")


@dataclass(frozen=True)
class Outcome:
    """A point that was made.

    Attributes
    ----------
    point
        What it is.
    runs
        The folders of its runs by seed.
    failures
        Why, by seed, of those that failed, as where training diverges.
    """

    point: Point
    runs: Mapping[int, Path]
    failures: Mapping[int, str]


def num_steps(sweep: Sweep) -> int:
    """Return how many steps a sweep takes.

    A step is a round of a training, which several runs may share, or the hand-over of
    a run.
    """
    return sum(map(_num_steps, _families(sweep, Path())))


def runs_there(sweep: Sweep, folder: Path) -> tuple[int, int]:
    """Return how many runs a sweep takes, and how many are done in ``folder``."""
    orders = [order for family in _families(sweep, folder) for order in family.orders]
    return len(orders), sum(is_done(order.folder) for order in orders)


def run_sweep(
    sweep: Sweep,
    folder: Path,
    num_workers: int,
    advance: Advance,
    command: Sequence[str] = COMMAND,
    earlier: Sequence[Path] = (),
) -> list[Outcome]:
    """Make all runs that are missing in ``folder``; return the points.

    Parameters
    ----------
    sweep
        What to run.
    folder
        Holds a folder for each run.
    num_workers
        Processes side by side; what they compute does not depend on it.
    advance
        Told how far the sweep is, in steps.
    command
        What was typed, for the runs' manifests.
    earlier
        Folders of finished runs, whose training those of the sweep's runs take over
        that train the same.

    Raises
    ------
    FolderTakenError
        If the folder is a file, or holds another batch or something else.
    RunError
        If another process is at work in it, or runs in it or the earlier ones were
        made from other data; and as `with_earlier_training`.
    KnnPerError
        If a run cannot be made for another reason than that its clients fail.
    """
    families = with_earlier_training(_families(sweep, folder, command), earlier)
    with batch_folder(folder, Identity("sweep", sweep.settings.name)):
        _make(families, num_workers, advance)
    return [Outcome(point, *by_seed(point.runs, folder)) for point in sweep.points]


def _families(
    sweep: Sweep, folder: Path, command: Sequence[str] = COMMAND
) -> list[Family]:
    return families_of(sweep.experiments, folder, command, keeps_training=True)


def _make(families: Sequence[Family], num_workers: int, advance: Advance) -> None:
    require_same_inputs(families)
    tracker = Tracker(num_workers)
    missing = tracker.expect(families)
    done = found = tracker.num_made
    advance(Progress(done, tracker.num_steps, found, tracker.left()))
    for told in play_side_by_side(missing, num_workers):
        tracker.note(told)
        # Rounds since the last checkpoint are repeated, and counted once.
        done = max(done, tracker.num_made)
        advance(Progress(done, tracker.num_steps, found, tracker.left()))


def _num_steps(family: Family) -> int:
    return family.num_rounds + len(family.orders)
