import json
from pathlib import Path

import pytest

from knnper.loading import load_experiment, to_document
from knnper.simulation.reports.runs import (
    departures,
    find_runs,
    in_common,
    load_run,
    setups_of,
)
from knnper.simulation.workbench import experiment_catalogue
from tests.simulation.reporting.made_runs import made_run


def labels(*paths: Path) -> list[str]:
    return [setup.label for setup in setups_of(map(load_run, paths))]


def test_runs_that_differ_in_the_seed_alone_are_one(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / str(seed), seed=seed) for seed in (7, 2)]
    (setup,) = setups_of(map(load_run, paths))
    assert [run.seed for run in setup.runs] == [2, 7]
    assert setup.label == "kNN-Per"


def test_settings_that_came_later_have_their_defaults(tmp_path: Path) -> None:
    document = {
        "name": "old",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 4},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "knn_per"},
    }
    whole = to_document(load_experiment(document, experiment_catalogue()))
    paths = []
    for seed, experiment in enumerate((document, whole)):
        paths.append(made_run(tmp_path / str(seed), seed=seed))
        results = json.loads((paths[-1] / "results.json").read_text())
        results["manifest"]["experiment"] = {**experiment, "run": {"seed": seed}}
        (paths[-1] / "results.json").write_text(json.dumps(results))
    assert labels(*paths) == ["kNN-Per"]


def test_the_same_seed_again_is_no_further_seed(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / name, seed=0) for name in ("first", "second")]
    assert labels(*paths) == ["kNN-Per (first)", "kNN-Per (second)"]


def test_a_run_that_is_named_twice_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made_run(tmp_path / "runs" / "a")
    made_run(tmp_path / "runs" / "b", seed=1)
    monkeypatch.chdir(tmp_path)
    for again in (path, Path("runs/a"), Path("runs/../runs/a")):
        assert [run.path for run in find_runs([path, again])[0]] == [path]
    named = find_runs([path, tmp_path / "runs", Path("runs")])[0]
    assert sorted(run.name for run in named) == ["a", "b"]
    assert [setup.label for setup in setups_of(named)] == ["kNN-Per"]


def test_a_label_tells_what_departs(tmp_path: Path) -> None:
    paths = [
        made_run(tmp_path / "a", learning_rate=0.1),
        made_run(tmp_path / "b", learning_rate=0.01),
        made_run(tmp_path / "c", method="fedavg", learning_rate=0.01),
    ]
    assert labels(*paths) == [
        "kNN-Per, learning_rate 0.1",
        "kNN-Per, learning_rate 0.01",
        "FedAvg",
    ]


def test_keys_that_end_alike_are_told_whole(tmp_path: Path) -> None:
    paths = [
        made_run(tmp_path / "a", rate=1, head={"rate": 2}),
        made_run(tmp_path / "b", rate=2, head={"rate": 1}),
    ]
    assert labels(*paths)[0] == "kNN-Per, training.rate 1, training.head.rate 2"


def test_where_much_departs_runs_are_named(tmp_path: Path) -> None:
    paths = [
        made_run(tmp_path / "x", a=1, b=1, c=1, d=1),
        made_run(tmp_path / "y", a=2, b=2, c=2, d=2),
        made_run(tmp_path / "more" / "x", a=3, b=3, c=3, d=3),
    ]
    assert labels(*paths[:2]) == ["kNN-Per (x)", "kNN-Per (y)"]
    assert labels(*paths[::2]) == [f"kNN-Per ({path})" for path in paths[::2]]


def test_departures_are_among_the_setups_that_have_the_key(tmp_path: Path) -> None:
    runs = [
        load_run(made_run(tmp_path / "a", momentum=0.9, batch_size=8)),
        load_run(made_run(tmp_path / "b", momentum=0.5, batch_size=8, only=1)),
        load_run(made_run(tmp_path / "c", batch_size=8)),
    ]
    found = departures(runs)
    assert found.keys == ("training.momentum",)
    assert found.cells == (("0.9",), ("0.5",), ("-",))
    common = in_common(runs)
    assert common["training.batch_size"] == "8"
    assert "training.only" not in common
    assert "training.momentum" not in common
