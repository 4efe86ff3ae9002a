"""Files that are changed, deleted, made by older code or by faulty code."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from knnper.files import JsonLines
from papers.reproduce import Made, Maker, read_files
from tests.papers.quiet_watcher import QuietWatcher
from tests.papers.small_files import (
    BASE,
    COMPARISON,
    FIGURE,
    SWEEP,
    write,
)
from tests.simulation.batches.small_sweep import in_this_process

PLAIN_SWEEP = {key: value for key, value in SWEEP.items() if key != "x"}
NEIGHBORS = "personalization.num_neighbors"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "knnper.simulation.batches.runner.run_in_workers"
    monkeypatch.setattr(place, in_this_process)


def play(folder: Path, *documents: dict[str, Any]) -> list[Made]:
    paths = [write(folder, document) for document in documents]
    return Maker(folder / "out", 1, QuietWatcher()).make_all(read_files(paths))


def bars(played: Made) -> list[str]:
    """Return what the first chart shows the averages of."""
    assert played.shown is not None, played.failure
    axes = played.shown.charts[0].draw().axes[0]
    return [label.get_text() for label in axes.get_yticklabels()]


def test_a_sweep_that_changed_shows_what_it_asks_for(tmp_path: Path) -> None:
    sweep = {**PLAIN_SWEEP, "seeds": [1]}
    (first,) = play(tmp_path, {**sweep, "vary": {NEIGHBORS: [1, 5]}})
    both = ["kNN-Per, num_neighbors 1", "kNN-Per, num_neighbors 5"]
    assert sorted(bars(first)) == ["FedAvg", *both]
    (second,) = play(tmp_path, {**sweep, "vary": {NEIGHBORS: [5]}})
    assert sorted(bars(second)) == ["FedAvg", "kNN-Per"]
    page = (tmp_path / "out/neighbors/report.html").read_text()
    assert "num_neighbors 1" not in page
    # Nothing had to be made.
    assert second.making == first.making
    assert len(list((tmp_path / "out/neighbors/runs").iterdir())) == 2


def test_a_comparison_that_changed_shows_what_it_asks_for(tmp_path: Path) -> None:
    play(tmp_path, COMPARISON)
    method = {"method": {"name": "knn_per"}}
    other = {**method, "personalization": {"num_neighbors": 3}}
    rows = {**COMPARISON["rows"], "memory": other}
    rows["again"] = {**other, "title": "Again"}
    (second,) = play(tmp_path, {**COMPARISON, "rows": rows})
    # Two rows have their run in common, and the one before is not among them.
    assert sorted(bars(second)) == ["FedAvg", "kNN-Per"]


def test_older_code_is_told(tmp_path: Path) -> None:
    play(tmp_path, BASE, FIGURE)
    output = tmp_path / "out"
    (training,) = (output / "runs").iterdir()
    for run in (output / BASE["name"], training):
        (run / "code.txt").write_text("older")
    parts = JsonLines(output / FIGURE["name"] / "parts.jsonl")
    identity, part = parts.read()
    parts.replace([identity, {**part, "code": "older"}])
    told = []
    for one in play(tmp_path, BASE, FIGURE):
        assert one.shown is not None
        told.append(" ".join(one.shown.remarks))
    assert f"1 of the runs in {output / 'base'} were made by another" in told[0]
    assert f"1 of the runs in {training} were made by another version" in told[1]
    assert "1 of the 1 parts of the figure in" in told[1]
    page = (output / BASE["name"] / "report.html").read_text()
    assert "another version of this code" in page

    # As it says.
    shutil.rmtree(output / BASE["name"])
    (anew,) = play(tmp_path, BASE)
    assert anew.shown is not None
    assert anew.shown.remarks == ()
    seconds = JsonLines(output / "seconds.jsonl").read()
    (mine,) = [one["seconds"] for one in seconds if one["name"] == BASE["name"]]
    assert anew.making.seconds == mine


def test_faults_of_the_code_do_not_stop_the_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*arguments: object) -> None:
        raise KeyError("lost")

    with monkeypatch.context() as patch:
        patch.setattr("papers.reproduce.run_batch", faulty)
        failed, done = play(tmp_path, SWEEP, BASE)
    place = tmp_path / "out/errors/neighbors.txt"
    assert failed.failure == (
        f"KeyError: 'lost'. Where in the code that was stands in {place}"
    )
    assert done.failure is None
    text = place.read_text()
    assert text.startswith("Traceback")
    assert 'raise KeyError("lost")' in text

    wrong = {**BASE, "training": {"num_rounds": 3}}
    mended, refused = play(tmp_path, {**SWEEP, "seeds": [1]}, wrong)
    assert mended.failure is None
    assert "holds a run with other settings" in str(refused.failure)
    # It was mended, and what is expected needs no traceback.
    assert not list(place.parent.iterdir())


def test_runs_that_all_failed_are_told(tmp_path: Path) -> None:
    diverging = {**BASE["training"], "learning_rate": 1e30}
    base = {**BASE, "training": diverging}
    (one,) = play(tmp_path, {**PLAIN_SWEEP, "base": base, "seeds": [1]})
    assert "no run of the file has results: " in str(one.failure)
    assert "failed with seed 1" in str(one.failure)
