"""The ClientApp of every node: of a simulation, or of a site with data of its own."""

from pathlib import Path

from flwr.app import Context, RecordDict

from client.app import Host, Player, make_client_app
from client.site.host import CONFIG, SiteHost
from knnper.transport.messages import Job
from simulation.client_runtime import VirtualHost


class AnyHost:
    """A node of either kind: it is a site's where it is configured with a client."""

    def open(self, context: Context, job: Job) -> Player:
        """See `client.app.Host`."""
        return _host(context).open(context, job)

    def carrier_folder(self, context: Context, job: Job) -> Path | None:
        """See `client.app.Host`."""
        return _host(context).carrier_folder(context, job)

    def introduce(self, context: Context, job: Job | None) -> RecordDict:
        """See `client.app.Host`."""
        return _host(context).introduce(context, job)

    def refused(self, context: Context, reason: str) -> None:
        """See `client.app.Host`."""
        _host(context).refused(context, reason)


def _host(context: Context) -> Host:
    return SiteHost() if CONFIG in context.node_config else VirtualHost()


client_app = make_client_app(AnyHost())
