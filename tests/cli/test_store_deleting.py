"""``knnper store delete``, and what it proves."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import knnper_cli.store
from knnper.datastore.store import open_store
from knnper_cli.app import app
from tests.cli.store_commands import (
    NUM_EXAMPLES,
    described,
    done,
    id_of,
    refused,
    store,
)


def test_delete_proves_that_nothing_is_left(folder: Path, images: Path) -> None:
    gone = images / "3" / "1.png"
    assert store("verify", folder, "--absent", gone).exit_code == 1
    result = done("delete", folder, "--external-id", "3/1.png", "--yes")
    assert "1 example deleted\nnone of their bytes are in any of the" in result.stdout
    assert "(inputs and embeddings looked for: 2)" in result.stdout
    result = done("verify", folder, "--absent", gone)
    assert "none of their bytes are in any of the" in result.stdout
    other = store("verify", folder, "--absent", images / "3" / "0.png", "--json")
    assert other.exit_code == 1
    name, found = str(images / "3" / "0.png"), id_of(folder, "3/0.png")
    assert json.loads(other.stdout)["copies"] == {name: found}
    text = store("verify", folder, "--absent", name).stdout
    assert f"{name} is not absent: it is, in every byte, example {found}" in text
    assert "sound" in done("verify", folder).stdout


@pytest.mark.parametrize(
    ("options", "num_left"),
    [
        (("--label", "7"), 36),
        (("--label", "7", "--label", "8"), 32),
        (("--id", 1, "--id", 2, "--id", 99), 38),
        (("--id", 1, "--id", 99, "--before", "2000-01-01"), 40),
        (("--from", "2000-01-01", "--before", "2001-01-01T00:00+02:00"), 40),
        (("--from", "2000-01-01"), 0),
    ],
)
def test_delete_takes_what_all_options_describe(
    folder: Path, options: tuple[object, ...], num_left: int
) -> None:
    result = store("delete", folder, *options, "--yes", "--no-proof")
    assert result.exit_code == (1 if num_left == 40 else 0)
    assert ("nothing is deleted" in result.stderr) == (num_left == 40)
    assert ("no example --id 99" in result.stderr) == (99 in options)
    assert described(folder)["num_examples"] == num_left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "say which"),
        (("--label", "seven"), "found 'seven', expected a number from 0 to 9 or one"),
        (("--label", "10"), "found '10', expected a number from 0 to 9"),
        (("--from", "yesterday"), "expected a time such as"),
        (("--id", 1), "40 examples of .* give --yes"),
    ],
)
def test_delete_refuses(
    folder: Path, options: tuple[object, ...], message: str
) -> None:
    refused(2, message, "delete", folder, *options)
    assert described(folder)["num_examples"] == NUM_EXAMPLES


def test_delete_as_json(folder: Path) -> None:
    options = ("--external-id", "3/1.png", "--external-id", "3/x.png", "--yes")
    gone = id_of(folder, "3/1.png")
    document = json.loads(done("delete", folder, *options, "--json").stdout)
    assert (document["num_deleted"], document["num_examples"]) == (1, 39)
    assert document["ids"] == [gone]
    assert document["missing"] == {"id": [], "external-id": ["3/x.png"]}
    assert document["proof"]["absent"] is True
    again = store("delete", folder, *options, "--json")
    assert again.exit_code == 1
    assert json.loads(again.stdout)["proof"] is None


def test_traces_in_foreign_files_are_told_from_the_stores(folder: Path) -> None:
    number = id_of(folder, "3/1.png")
    with open_store(folder) as opened:
        pixels = opened.inputs(np.array([number])).numpy().tobytes()
    (folder / "copy.bin").write_bytes(pixels)
    result = store("delete", folder, "--id", number, "--yes")
    assert result.exit_code == 1
    assert f"bytes of the input of example {number} are in" in result.stdout
    assert "remove or move elsewhere what is not the store's" in result.stderr
    assert "copy.bin" in result.stderr
    assert "compact" not in result.stderr


def test_what_cannot_be_looked_for_is_not_said_to_be_absent(
    folder: Path, tmp_path: Path
) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "black.png")
    arguments = ("verify", folder, "--absent", tmp_path / "black.png")
    refused(1, "black.png: that it is absent cannot be proven", *arguments)
    result = store(*arguments, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["absent"] is None


def test_delete_asks_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal:
        isatty = staticmethod(lambda: True)

    class System:
        stdin = Terminal

    monkeypatch.setattr(knnper_cli.store, "sys", System)
    arguments = ["store", "delete", str(folder), "--id", "1"]
    kept = CliRunner().invoke(app, arguments, input="n\n")
    assert kept.exit_code == 1
    assert "Delete 1 of 40 examples" in kept.stderr
    assert described(folder)["num_examples"] == NUM_EXAMPLES
    agreed = CliRunner().invoke(app, arguments, input="y\n")
    assert agreed.exit_code == 0
    assert described(folder)["num_examples"] == NUM_EXAMPLES - 1
