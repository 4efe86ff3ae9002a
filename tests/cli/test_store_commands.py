"""``knnper store``, with the models of two tiny runs."""

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import knnper.cli.store
from knnper.cli.app import app
from knnper.cli.counters import Counter
from knnper.cli.formats import as_time
from knnper.data.digits import DigitsSettings
from knnper.datastore.index import FactorySettings
from knnper.datastore.store import DATABASE, open_store
from tests.cli.store_commands import (
    NUM_EXAMPLES,
    described,
    done,
    id_of,
    refused,
    store,
)


def test_create_says_what_the_store_is_for(tmp_path: Path, run: Path) -> None:
    folder = tmp_path / "store"
    arguments = ("--policy", "fifo", "--capacity", 100, "--seed", 3)
    more = ("--index", "SQ8", "--set", "index.rerank=2", "--no-inputs")
    done("create", folder, "--model", run, *arguments, *more)
    with open_store(folder) as opened:
        assert opened.spec.class_names == tuple("0123456789")
        assert opened.spec.input is None
        assert (opened.embedding_dim, opened.capacity) == (8, 100)
        assert (opened.settings.policy, opened.settings.seed) == ("fifo", 3)
        assert opened.settings.index == FactorySettings("SQ8", rerank=2)
        assert opened.settings.index.candidates_for(10) == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "lifo"), 'store.policy: unknown name "lifo"; did you mean'),
        (("--set", "polcy=fifo"), "did you mean 'policy'?"),
    ],
)
def test_create_refuses_wrong_settings(
    tmp_path: Path, run: Path, options: tuple[object, ...], message: str
) -> None:
    refused(2, message, "create", tmp_path / "store", "--model", run, *options)
    assert not (tmp_path / "store").exists()


def test_add_stores_what_is_new(folder: Path, run: Path, images: Path) -> None:
    with open_store(folder) as opened:
        ids = opened.contents().ids
        assert len(ids) == NUM_EXAMPLES
        names = opened.external_ids(ids)
        labels = opened.contents().labels.tolist()
        assert sorted(map(str, names)) == [
            f"{digit}/{n}.png" for digit in range(10) for n in range(4)
        ]
        assert labels == [int(str(name)[0]) for name in names]
    result = done("add", folder, images, "--model", run, "--json")
    figures = json.loads(result.stdout)
    assert figures["num_stored"] == 0
    assert figures["num_skipped"] == figures["num_examples"] == NUM_EXAMPLES


def test_add_refuses_what_is_of_another_model_class_or_time(
    folder: Path, run: Path, other_run: Path, images: Path, tmp_path: Path
) -> None:
    result = refused(1, "store reembed", "add", folder, images, "--model", other_run)
    assert not re.search("[0-9a-f]{13}", result.stderr)
    (tmp_path / "more" / "eleven").mkdir(parents=True)
    added = ("add", folder, tmp_path / "more", "--model", run)
    refused(1, "does not know: eleven", *added)
    data = DigitsSettings().load().train
    late = tmp_path / "late.npz"
    inputs, moments = np.asarray(data.images[:2]), np.full(2, 1.79e12)
    np.savez(late, inputs=inputs, labels=np.zeros(2, int), arrivals=moments)
    refused(1, "divide milliseconds by 1000", "add", folder, late, "--model", run)
    assert as_time(1.79e12) == "1.79e+12 seconds since 1970"
    assert as_time(0.0) == "1970-01-01T00:00:00+00:00"


def test_info(folder: Path) -> None:
    document = described(folder)
    assert document["num_by_label"] == [4] * 10
    assert document["is_erasing"] is False
    assert document["writer"] is None
    text = done("info", folder).stdout
    assert f"examples: {NUM_EXAMPLES}" in text
    assert "capacity: not bounded" in text
    with open_store(folder, writable=True):
        assert described(folder)["writer"] is not None
    done("rewrite", folder, "--set", "capacity=50")
    assert "capacity: 50 examples, room for 10 more" in done("info", folder).stdout
    refused(1, "holds no store", "info", folder.parent)


def test_verify(folder: Path) -> None:
    result = done("verify", folder)
    assert result.stdout.count("\n") == 1
    assert "is sound: 40 examples" in result.stdout
    (folder / "stray").write_text("")
    stray = "stray does not belong to the store.* to fix it: move it elsewhere"
    refused(1, stray, "verify", folder)
    document = json.loads(store("verify", folder, "--json").stdout)
    assert document["sound"] is False
    assert len(document["findings"]) == 1


def test_exported_examples_can_be_added(
    folder: Path, run: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.npz"
    done("export", folder, target)
    assert store("export", folder, target).exit_code == 1
    assert store("export", folder, tmp_path / "out.zip").exit_code == 2
    done("export", folder, target, "--overwrite")
    done("create", tmp_path / "copy", "--model", run)
    done("add", tmp_path / "copy", target, "--model", run)
    done("export", tmp_path / "copy", tmp_path / "again.npz")
    with np.load(target) as first, np.load(tmp_path / "again.npz") as second:
        assert set(first) == set(second)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])


def test_configure(folder: Path) -> None:
    shown = done(
        "rewrite", folder, "--set", "index={name: factory, factory: HNSW16}", "--json"
    ).stdout
    assert json.loads(shown)["index"]["factory"] == "HNSW16"
    assert described(folder)["index_bytes"] != 0
    assert "sound" in done("verify", folder).stdout
    change = ("rewrite", folder, "--set")
    refused(2, 'store.capacity: found "few"', *change, "capacity=few")
    assert "and takes" in done("rewrite", folder).stderr
    assert "sound" in done("verify", folder).stdout


def test_reembed_and_back(
    folder: Path, run: Path, other_run: Path, images: Path
) -> None:
    def fingerprint() -> str:
        with open_store(folder) as opened:
            return opened.fingerprint

    first = fingerprint()
    assert "already" in done("reembed", folder, "--model", run).stderr
    assert "roll-back" in done("reembed", folder, "--model", other_run).stderr
    assert fingerprint() != first
    assert "sound" in done("verify", folder).stdout
    done("add", folder, images, "--model", other_run)
    done("reembed", folder, "--roll-back")
    assert fingerprint() == first
    assert store("reembed", folder).exit_code == 2
    assert store("reembed", folder, "--model", run, "--roll-back").exit_code == 2
    without = folder.with_name("without inputs")
    done("create", without, "--model", run, "--no-inputs")
    advice = "knnper store create NEW_FOLDER --model"
    refused(1, advice, "reembed", without, "--model", other_run)


def test_a_counter_writes_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    moments = iter([0.0, 0.0, 1.0, 6.0, 6.0, 6.0, 7.0])
    counted = Counter("examples", None, lambda: next(moments))
    counted.start(100)
    counted.advance(10)
    counted.advance(20)
    counted.advance(1)
    assert capsys.readouterr().err == "examples: 30/100, 14 s left\n"


def _cut(folder: Path) -> None:
    content = (folder / DATABASE).read_bytes()
    (folder / DATABASE).write_bytes(content[: len(content) // 2])


def _change_a_label(folder: Path) -> None:
    with closing(sqlite3.connect(folder / DATABASE)) as connection, connection:
        connection.execute("UPDATE examples SET label = 2000000000 WHERE id = 5")


@pytest.mark.parametrize("harm", [_cut, _change_a_label])
def test_every_command_says_that_a_store_is_damaged(
    folder: Path, run: Path, images: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    harm(folder)
    for command in (
        ("info", folder),
        ("add", folder, images, "--model", run),
        ("verify", folder),
        ("delete", folder, "--label", 3, "--yes"),
        ("export", folder, tmp_path / "out.npz"),
        ("rewrite", folder, "--set", "capacity=8000"),
        ("rewrite", folder),
        ("reembed", folder, "--roll-back"),
        ("reembed", folder, "--model", run),
    ):
        result = store(*command)
        assert result.exit_code == 1, command
        assert isinstance(result.exception, SystemExit), result.exception
        said = result.output
        assert "backup" in said or "Copy the whole folder" in said, command
    assert not (tmp_path / "out.npz").exists()


def test_rewrite_saves_intact_examples(folder: Path, tmp_path: Path) -> None:
    _change_a_label(folder)
    result = store("verify", folder)
    assert result.exit_code == 1
    assert f"{NUM_EXAMPLES - 1} examples" in result.stdout
    salvage = json.loads(store("verify", folder, "--json").stdout)["salvage"]
    copying = ("rewrite", folder, "--to")
    saved = json.loads(done(*copying, tmp_path / "new", "--json").stdout)
    assert saved == salvage
    assert (saved["num_saved"], saved["lost"]) == (NUM_EXAMPLES - 1, [5])
    assert described(tmp_path / "new")["num_examples"] == NUM_EXAMPLES - 1
    assert store(*copying, tmp_path / "new").exit_code == 1
    shown = done(*copying, tmp_path / "newer").stdout
    assert "1 example damaged and left out: 5" in shown


@pytest.mark.parametrize(
    ("options", "num_left"),
    [
        (("--label", "7", "--label", "8"), 32),
        (("--id", 1, "--id", 99, "--before", "2000-01-01"), 40),
        (("--from", "2000-01-01", "--before", "2001-01-01T00:00+02:00"), 40),
        (("--from", "2000-01-01"), 0),
    ],
)
def test_delete_takes_what_all_options_describe(
    folder: Path, options: tuple[object, ...], num_left: int
) -> None:
    result = store("delete", folder, *options, "--yes")
    assert result.exit_code == (1 if num_left == 40 else 0)
    assert ("no example is deleted" in result.stderr) == (num_left == 40)
    assert ("no example --id 99" in result.stderr) == (99 in options)
    assert described(folder)["num_examples"] == num_left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give at least one of"),
        (("--label", "seven"), "found 'seven', expected a number from 0 to 9 or one"),
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
    again = store("delete", folder, *options, "--json")
    assert again.exit_code == 1
    assert json.loads(again.stdout)["num_deleted"] == 0


def test_delete_asks_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal:
        isatty = staticmethod(lambda: True)

    class System:
        stdin = Terminal

    monkeypatch.setattr(knnper.cli.store, "sys", System)
    arguments = ["store", "delete", str(folder), "--id", "1"]
    kept = CliRunner().invoke(app, arguments, input="n\n")
    assert kept.exit_code == 1
    assert "Delete 1 of 40 examples" in kept.stderr
    assert described(folder)["num_examples"] == NUM_EXAMPLES
    agreed = CliRunner().invoke(app, arguments, input="y\n")
    assert agreed.exit_code == 0
    assert described(folder)["num_examples"] == NUM_EXAMPLES - 1
