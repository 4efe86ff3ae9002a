"""The commands of ``knnper federation``."""

import typer

from knnper.cli.errors import ErrorReportingGroup
from knnper.cli.federation.clients import (
    add_client,
    list_clients,
    register,
    remove_client,
)
from knnper.cli.federation.founding import init, renew

federation = typer.Typer(
    name="federation",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="Make a federation's certificates and keys; say who may connect.",
)
for _command in (init, add_client, register, remove_client, renew):
    federation.command()(_command)
federation.command(name="list")(list_clients)
