"""The commands of ``knnper site``: its data, its service, its own memory."""

import typer

from knnper.cli.audit_log import audit_site
from knnper.cli.errors import ErrorReportingGroup
from knnper.cli.options import AsJson, ClientFile
from knnper.cli.site_data import check
from knnper.cli.site_memory import onboard, refresh
from knnper.cli.site_service import serve, token

site = typer.Typer(
    name="site",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="Commands of a site: check data, onboard, refresh, serve, diagnose, audit.",
)


def doctor(config: ClientFile, as_json: AsJson = False) -> None:
    """Diagnose a client and the connection to its server, and suggest fixes.

    Nothing is changed, and a running client is not disturbed. The exit code is 1 when a
    check fails, 2 when the client's file is invalid.
    """
    import knnper.transport  # noqa: F401 (switches off Flower's telemetry and update check)
    from knnper.cli.diagnosis import client_verdict, diagnose
    from knnper.client.doctor import client_checks
    from knnper.client.settings import read_client

    settings = read_client(config)
    checks = client_checks(settings)
    diagnose("client", settings.name, config, checks, client_verdict, as_json=as_json)


for _command in (check, onboard, refresh, serve, doctor):
    site.command()(_command)


site.command(name="audit")(audit_site)
site.add_typer(token)
