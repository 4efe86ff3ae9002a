"""``knnper methods``: the methods that can be chosen."""

from dataclasses import fields

from knnper.cli.options import AsJson
from knnper.cli.output import print_json, print_table


def methods(as_json: AsJson = False) -> None:
    """List the methods: what they send, keep, and do for newcomers."""
    # Loading the methods loads torch, which the other commands need not wait for.
    from strategies.catalogue import METHODS

    rows = [
        {
            "name": name,
            "title": spec.title,
            "summary": spec.summary,
            "upload_models": spec.upload,
            "download_models": spec.download,
            "client_state_models": spec.client_state,
            "unseen_clients": spec.unseen,
            "source": spec.source,
            "settings": [one.name for one in fields(spec.settings_type)],
            "personalization": [one.name for one in fields(spec.personalization_type)],
        }
        for name, spec in METHODS.items()
    ]
    if as_json:
        print_json(rows)
        return
    header = ("name", "method", "summary", "up", "down", "state", "unseen clients get")
    print_table(header, [list(map(str, row.values()))[: len(header)] for row in rows])
