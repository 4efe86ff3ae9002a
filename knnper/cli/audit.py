"""``knnper audit``: attacks on a finished run or a running service."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from knnper.cli.errors import typed_command
from knnper.cli.options import AsJson
from knnper.cli.terminal import print_json, print_table, say
from knnper.server.observer import progress_observer

# Modules that load torch are imported inside functions, to keep `knnper --help` fast.
if TYPE_CHECKING:
    from knnper.simulation.audit.audit import Target

RunOrUrl = Annotated[
    str,
    typer.Argument(
        metavar="RUN|URL",
        help="The folder of a finished simulation, or the address of a service, such "
        "as http://127.0.0.1:8080.",
    ),
]
OwnersFile = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="CLIENT.yaml",
        help="With URL: the file of its client. The data must have stored and test "
        "examples.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="With URL: file of the attacker's token; its scopes decide which attacks "
        "are possible.",
        show_default="the owner's, `token` in the client's state folder",
    ),
]
Attacks = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="Attacks, with commas between them.",
        show_default="all that apply",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="The record of the audit.",
        show_default="audit.json, in the folder of a run",
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
    target: RunOrUrl,
    data: OwnersFile = None,
    attacks: Attacks = None,
    output: Output = None,
    seed: Seed = 0,
    shadow_models: ShadowModels = 4,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Attack a finished run or a running service, and measure what leaks.

    The figures are results of these attacks, with intervals, and no bounds: better
    attacks exist. The record is a JSON file; `knnper report` shows that of a run.
    """
    is_service = target.startswith(("http://", "https://"))
    has_service_options = data is not None or token_file is not None
    if (is_service and data is None) or (not is_service and has_service_options):
        raise typer.BadParameter(
            "a URL goes with --data CLIENT.yaml, and the folder of a run with neither "
            "--data nor --token-file"
        )
    from knnper.simulation.audit.audit import AUDIT, FILE, audit_target, write_audit
    from knnper.simulation.audit.run_target import open_run
    from knnper.simulation.reports.audit_section import audit_table

    with progress_observer() as observer:
        if data is not None:
            opened: Target = _open_service(target, data, token_file)
        else:
            opened = open_run(Path(target), shadow_models, observer)
        chosen = _chosen(attacks, opened.attacks)
        record = audit_target(opened, chosen, seed, typed_command())
    path = output or (Path(FILE) if is_service else Path(target) / FILE)
    write_audit(path, record)
    if as_json:
        print_json(AUDIT.dump_python(record, mode="json"))
    else:
        table = audit_table(record, "Audit")
        print_table(table.header, table.rows)
    say(f"The record of the audit is in {path}")


def _open_service(url: str, data: Path, token_file: Path | None) -> "Target":
    from knnper.client.settings import read_client
    from knnper.process import import_extra

    import_extra("httpx", "deployment", "knnper audit URL")
    from knnper.simulation.audit.service_target import open_service

    settings = read_client(data)
    path = token_file or settings.state / "token"
    # A service with --no-token has no owner's token either.
    has_token = token_file is not None or path.exists()
    token = path.read_text(encoding="utf-8").strip() if has_token else ""
    return open_service(url, settings, token)


def _chosen(attacks: str | None, possible: Collection[str]) -> Sequence[str]:
    if attacks is None:
        return [*possible]
    from knnper.settings import alternatives

    names = [name.strip() for name in attacks.split(",")]
    for name in names:
        if name not in possible:
            raise typer.BadParameter(
                f"--attacks: found {name!r}; {alternatives(name, possible)}"
            )
    return names
