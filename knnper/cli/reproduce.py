"""``knnper reproduce``: protocol files of all kinds, and one report on them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.errors import RUN_FAILED
from knnper.cli.output import say
from knnper.cli.resumable import interruptible

if TYPE_CHECKING:
    from simulation.reproducing.playing import Played

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="Files of figures, sweeps, comparisons and experiments.",
    ),
]
Output = Annotated[
    Path, typer.Option(metavar="FOLDER", help="A folder for each file, and the report.")
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes side by side; one a CPU core."),
]
SkipMissingData = Annotated[
    bool,
    typer.Option(
        "--skip-missing-data",
        help="Leave out files whose data are not there, in place of failing.",
    ),
]


def reproduce(
    files: Files,
    output: Output = Path("runs/reproduced"),
    workers: Workers = None,
    skip_missing_data: SkipMissingData = False,
) -> None:
    """Play protocol files one after the other; leave one report with all figures.

    Interrupted, it goes on with the same command; what is done is not done again.
    """
    # All below loads torch, which `knnper --help` need not wait for.
    from knnper.cli.reproducing import TerminalWatcher
    from simulation.reproducing.page import write_report
    from simulation.reproducing.playing import Player
    from simulation.reproducing.protocols import read_protocols

    protocols = read_protocols(files)
    player = Player(output, workers, TerminalWatcher(), skip_missing_data)
    with interruptible(output):
        played = player.play_all(protocols)
        page = write_report(played, output)
    say(f"The report is in {page}: one file, open it with a browser")
    _end(played)


def _end(played: "list[Played]") -> None:
    """Say what failed, and exit with that."""
    failed = [one.protocol.name for one in played if one.failure is not None]
    if failed:
        say(f"{len(failed)} of {len(played)} files failed: {', '.join(failed)}")
        raise typer.Exit(RUN_FAILED)
