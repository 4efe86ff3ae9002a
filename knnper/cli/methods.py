"""``knnper methods``: the methods that can be chosen, and what can be put on top."""

from dataclasses import fields
from typing import TYPE_CHECKING

from knnper.cli.options import AsJson
from knnper.cli.output import print_json, print_table

if TYPE_CHECKING:
    from strategies.core.personalizer import PersonalizerSpec


def methods(as_json: AsJson = False) -> None:
    """List the methods: what they send, keep, and do for newcomers."""
    # Loading the methods loads torch, which the other commands need not wait for.
    from strategies.catalogue import METHODS
    from strategies.personalizers import PERSONALIZERS

    rows = [
        {
            "name": name,
            "title": spec.title,
            "summary": spec.summary,
            "upload_models": spec.upload,
            "download_models": spec.download,
            "client_state_models": spec.client_state,
            "server_state_models": spec.server_state
            + ("; a round's updates" if spec.holds_all_updates else ""),
            "unseen_clients": spec.unseen,
            "server_holds_all_updates": spec.holds_all_updates,
            "source": spec.source,
            "settings": [one.name for one in fields(spec.settings_type)],
            "personalization": spec.personalization,
        }
        for name, spec in METHODS.items()
    ]
    on_top = [
        {
            "name": name,
            "title": spec.title,
            "summary": spec.summary,
            "unseen_clients": spec.unseen,
            "needs": _needs(spec),
            "source": spec.source,
            "settings": [one.name for one in fields(spec.settings_type)],
        }
        for name, spec in PERSONALIZERS.items()
    ]
    if as_json:
        print_json({"methods": rows, "personalizations": on_top})
        return
    header = ("name", "method", "summary", "up", "down", "client", "server", "unseen")
    print_table(header, [list(map(str, row.values()))[: len(header)] for row in rows])
    print_table(
        ("personalization", "title", "summary", "unseen clients", "needs"),
        [list(map(str, row.values()))[:5] for row in on_top],
    )


def _needs(spec: "PersonalizerSpec") -> str:
    """Return what must be there beside a client's own data."""
    needs = {
        "one model a client": spec.needs_one_model,
        "data of the server's": spec.needs_proxy,
    }
    return ", ".join(need for need, needed in needs.items() if needed)
