"""``knnper datasets``: the data sets that can be chosen."""

from dataclasses import fields
from typing import Any

from knnper.cli.options import AsJson
from knnper.cli.output import print_json, print_table


def datasets(as_json: AsJson = False) -> None:
    """List the data sets and the settings that each takes."""
    # Loading the data sets loads torch, which the other commands need not wait for.
    from knnper.data.catalogue import DATA_SETS

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "title": spec.title,
            "summary": spec.summary,
            "settings": [one.name for one in fields(spec.settings_type)],
        }
        for name, spec in DATA_SETS.items()
    ]
    if as_json:
        print_json(rows)
        return
    header = ("name", "data set", "summary", "settings")
    table = [
        (row["name"], row["title"], row["summary"], ", ".join(row["settings"]))
        for row in rows
    ]
    print_table(header, table)
