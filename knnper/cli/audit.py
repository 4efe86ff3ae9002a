"""``knnper audit``: attacks on a finished run or a running service."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.terminal import print_table, say
from knnper.server.observer import progress_observer

# Modules that load torch are imported inside functions, to keep `knnper --help` fast.
if TYPE_CHECKING:
    from knnper.simulation.audit.audit import Target

RunOrClient = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|CLIENT.yaml",
        help="The folder of a finished simulation; or the file of a client with a "
        "running service on this machine, and with stored and test examples.",
    ),
]
Attacks = Annotated[
    list[str] | None,
    typer.Option(
        "--attack",
        metavar="NAME",
        help="An attack; may be repeated.",
        show_default="all that apply",
    ),
]
Seed = Annotated[int, typer.Option(help="Of all random choices of the audit.")]
ShadowModels = Annotated[
    int,
    typer.Option(
        min=2,
        metavar="N",
        help="Models that the attack lira trains; each takes as long as the run's "
        "training in one process.",
    ),
]


def audit(
    target: RunOrClient,
    attacks: Attacks = None,
    seed: Seed = 0,
    shadow_models: ShadowModels = 4,
) -> None:
    """Attack a finished run or a running service, and measure what leaks.

    The figures are results of these attacks, with intervals, and no bounds: better
    attacks exist. The record is audit.json, in the folder of a run (`knnper report`
    shows it), or for a service in the current folder.
    """
    from knnper.server.run_folder import write_document
    from knnper.settings import alternatives
    from knnper.simulation.audit.audit import FILE, audit_target
    from knnper.simulation.audit.run_target import open_run
    from knnper.simulation.reports.audit_section import audit_table

    with progress_observer() as observer:
        if target.is_file():
            path = Path(FILE)
            opened: Target = _open_service(target)
        else:
            path = target / FILE
            opened = open_run(target, shadow_models, observer)
        for name in attacks or ():
            if name not in opened.attacks:
                raise typer.BadParameter(
                    f"--attack: found {name!r}; {alternatives(name, opened.attacks)}"
                )
        record = audit_target(opened, attacks or [*opened.attacks], seed)
    write_document(path, asdict(record))
    table = audit_table(record, "Audit")
    print_table(table.header, table.rows)
    say(f"The record of the audit is in {path}")


def _open_service(client: Path) -> "Target":
    from knnper.client.settings import read_client
    from knnper.process import import_extra

    import_extra("httpx", "deployment", "knnper audit CLIENT.yaml")
    from knnper.simulation.audit.service_target import open_service

    return open_service(read_client(client))
