"""``knnper store`` as a user types it."""

import json
import re
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.datastore.examples import Selection
from knnper.datastore.store import open_store

NUM_EXAMPLES = 40
"""In the store of the fixture ``folder``."""


def store(*arguments: object) -> Result:
    words = ["store", *(str(argument) for argument in arguments)]
    return CliRunner().invoke(app, words)


def done(*arguments: object) -> Result:
    result = store(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(exit_code: int, message: str, *arguments: object) -> Result:
    result = store(*arguments)
    assert result.exit_code == exit_code, result.output
    text = re.sub(r"[\s│]+", " ", result.stderr + result.stdout)
    assert re.search(message, text), result.output
    return result


def id_of(folder: Path, name: str) -> int:
    with open_store(folder) as opened:
        return int(opened.select(Selection(external_ids=(name,)))[0])


def described(folder: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads(done("info", folder, "--json").stdout)
    return document
