"""The file of a comparison: candidates, titles, and all errors at once."""

from pathlib import Path
from typing import Any

import pytest

from knnper.errors import ConfigError
from knnper.experiment import Experiment
from knnper.loading import dump_yaml
from knnper.simulation.batches.plan import Comparison, Point, read_comparison
from knnper.simulation.batches.runner import folder_of

PARTITION = {"name": "iid", "num_clients": 4}
BASE = {
    "data": {"name": "digits"},
    "partition": PARTITION,
    "model": {"name": "tiny_cnn", "embedding_dim": 4},
    "training": {"num_rounds": 2, "batch_size": 16},
}


FEDAVG: dict[str, Any] = {"method": {"name": "fedavg"}}


def document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "reference": "mean",
        "base": BASE,
        "seeds": [5, 6],
        "tuning_seed": 7,
        "grid": {"training.learning_rate": [0.1, 0.01]},
        "rows": {"mean": FEDAVG},
        **changes,
    }


def read(tmp_path: Path, *overrides: str, **changes: Any) -> Comparison:
    path = tmp_path / "small.yaml"
    path.write_text(dump_yaml(document(**changes)))
    return read_comparison(path, overrides)


def rows_of(tmp_path: Path, *overrides: str, **changes: Any) -> list[list[Point]]:
    return list(read(tmp_path, *overrides, **changes).variants.values())


def tuning_of(point: Point) -> Experiment:
    assert point.tuning is not None
    return point.tuning


def test_a_row_is_the_product_of_its_grid_and_the_common_one(tmp_path: Path) -> None:
    grid = {"personalization.num_epochs": [1, 3]}
    rows = {
        "mean": FEDAVG,
        "tuned": {"method": {"name": "fedavg_plus"}, "grid": grid},
    }
    mean, tuned = rows_of(tmp_path, rows=rows)
    assert [dict(one.values) for one in mean] == [
        {"training.learning_rate": 0.1},
        {"training.learning_rate": 0.01},
    ]
    assert [tuple(one.values.values()) for one in tuned] == [
        (0.1, 1),
        (0.1, 3),
        (0.01, 1),
        (0.01, 3),
    ]


def test_candidates_are_experiments(tmp_path: Path) -> None:
    (points,) = rows_of(tmp_path, "training.batch_size=8")
    point = points[1]
    assert tuning_of(point).training.learning_rate == 0.01
    assert tuning_of(point).training.batch_size == 8
    assert tuning_of(point).run.seed == 7
    assert tuning_of(point).partition.settings.evaluate_on == "validation"  # type: ignore[attr-defined]
    for seed in (5, 6):
        experiment = point.runs[seed]
        assert experiment.run.seed == seed
        assert experiment.partition.settings.evaluate_on == "test"  # type: ignore[attr-defined]
        assert experiment.run.engine == "serial"
    experiments = [point.tuning, *point.runs.values()]
    assert len({folder_of(one, tmp_path) for one in experiments if one}) == 3


def test_the_tuning_may_train_less(tmp_path: Path) -> None:
    shorter = {"training.num_rounds": 1, "training.momentum": 0.5}
    (points,) = rows_of(tmp_path, tuning_set=shorter)
    tuning, tested = tuning_of(points[1]), points[1].runs[5]
    assert (tuning.training.num_rounds, tuning.training.momentum) == (1, 0.5)
    assert (tested.training.num_rounds, tested.training.momentum) == (2, 0.0)
    assert tuning.training.learning_rate == tested.training.learning_rate == 0.01


def test_an_override_goes_before_what_differs_in_the_tuning(tmp_path: Path) -> None:
    shorter = {"training.num_rounds": 1}
    (points,) = rows_of(tmp_path, "training.num_rounds=4", tuning_set=shorter)
    point = points[0]
    assert tuning_of(point).training.num_rounds == 4
    assert point.runs[5].training.num_rounds == 4


def test_titles_are_the_methods_or_ones_own(tmp_path: Path) -> None:
    rows = {
        "mean": {"method": {"name": "fedem"}, "personalization": {"name": "knn"}},
        "own": {"method": {"name": "fedavg"}, "title": "The mean"},
    }
    titles = [row[0].title for row in rows_of(tmp_path, rows=rows)]
    assert titles == ["FedEM + kNN", "The mean"]


def test_each_row_can_be_shown_with_a_memory_too(tmp_path: Path) -> None:
    rows = {
        "mean": {"method": {"name": "fedavg"}, "grid": {"training.momentum": [0, 0.5]}},
        "named": {"method": {"name": "fedem"}, "title": "Three models"},
        "tuned": {"method": {"name": "fedavg"}, "personalization": {"name": "protonn"}},
    }
    found = rows_of(tmp_path, rows=rows, each_also_with={"name": "knn"})
    assert [row[0].variant for row in found] == [*rows, "mean-knn", "named-knn"]
    assert [row[0].title for row in found[-2:]] == [
        "FedAvg + kNN",
        "Three models + kNN",
    ]
    assert len(found[-2]) == 4
    assert tuning_of(found[-2][0]).personalization.name == "knn"


def test_what_chooses_nothing_needs_no_validation_data(tmp_path: Path) -> None:
    grid = {"training.learning_rate": [0.1]}
    (points,) = rows_of(tmp_path, "partition.validation_fraction=0", grid=grid)
    tested = points[0].runs[5].partition.settings
    assert tested.validation_fraction == 0  # type: ignore[attr-defined]


def test_what_is_wrong_is_said_of_every_row(tmp_path: Path) -> None:
    rows = {
        "mean": {"method": {"name": "fedavg", "lost": 1}},
        "other": {"method": {"name": "scaffold", "found": 2}},
    }
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, rows=rows)
    assert [one.place for one in caught.value.problems] == [
        "rows.mean: method.lost",
        "rows.other: method.found",
    ]


def test_knn_per_is_not_shown_twice(tmp_path: Path) -> None:
    wide = {"model": {"embedding_dim": 8}, "title": "FedAvg of 8"}
    rows = {"mean": FEDAVG, "memory": {"method": {"name": "knn_per"}}}
    rows["wide"] = {**FEDAVG, **wide}
    found = rows_of(tmp_path, rows=rows, each_also_with={"name": "knn"})
    assert [row[0].variant for row in found] == ["mean", "memory", "wide", "wide-knn"]


RATE = "training.learning_rate"
UNHELD = {**PARTITION, "validation_fraction": 0}
UNFIXED = {"threads_per_worker": "auto"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": "median"}, "'median', expected the name of a row: mean"),
        ({"rows": {}}, "rows"),
        ({"seeds": []}, "seeds"),
        ({"seeds": [0, 0, 1]}, r"seeds: found \[0, 0, 1\], expected each one once"),
        ({"kind": "table"}, "kind: unknown setting"),
        ({"name": "no/name"}, "name"),
        ({"rows": {"a b": FEDAVG}}, "rows.a b"),
        ({"grid": {"run.seed": [1, 2]}}, "grid run.seed: the comparison itself"),
        ({"grid": {"run": [{"seed": 1}]}}, "grid run.seed: the comparison itself"),
        ({"tuning_set": {"run.seed": 1}}, "tuning_set run.seed: the comparison itself"),
        ({"tuning_set": {RATE: 0.5}}, f"tuning_set {RATE}: is varied too; take"),
        ({"tuning_set": {"training": {"learning_rate": 1}}}, f"{RATE}: is varied too;"),
        ({"tuning_set": {"training.rounds": 1}}, "rows.mean: training.rounds: unknown"),
        (
            {"grid": {"training": [{}]}, "tuning_set": {"training.num_rounds": 1}},
            "tuning_set training.num_rounds: is varied too with training; take",
        ),
        (
            {"grid": {"training": [{}], "training.momentum": [0.0, 0.5]}},
            "rows.mean: grid training.momentum: is varied with training too; take",
        ),
        ({"grid": {"training.rate": [1]}}, r"rows.mean: training.rate: unknown"),
        ({"base": {**BASE, **FEDAVG}}, "base.method: unknown"),
        ({"base": {**BASE, "training": None}}, "base.training: found null"),
        ({"base": {**BASE, "model": "tiny_cnn"}}, "base.model: found .tiny_cnn."),
        (
            {"base": {**BASE, "partition": UNHELD}},
            "rows.mean: partition.validation_fraction: found 0, expected more",
        ),
        (
            {"base": {**BASE, "run": UNFIXED}},
            "rows.mean: run.threads_per_worker: found",
        ),
        (
            {"rows": {"mean": FEDAVG, "wide": {**FEDAVG, "model": {}}}},
            "rows.wide.title: found 'FedAvg', as mean has; expected a title of its own",
        ),
        (
            {
                "rows": {"mean": FEDAVG, "mean-knn": FEDAVG},
                "each_also_with": {"name": "knn"},
            },
            "rows.mean-knn: each_also_with adds a row of this name",
        ),
        ({"rows": {"mean": {"method": {"name": "fedaverage"}}}}, "did you mean"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rate=0.5", "override training.learning_rate: is varied"),
        ("training={learning_rate: 3}", "override training.learning_rate: is varied"),
        ("partition.validation_fraction=0", "validation_fraction: found 0, expected"),
        ("name=other", "override name: the comparison itself"),
        ("run={seed: 3}", "override run.seed: the comparison itself"),
        ("partition.evaluate_on=validation", "override partition.evaluate_on"),
        ("lost", "expected KEY=VALUE"),
    ],
)
def test_an_override_must_leave_the_comparison_one(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, override)


def test_a_section_is_set_as_a_whole_below_the_grid(tmp_path: Path) -> None:
    (points,) = rows_of(tmp_path, "training={num_rounds: 3}")
    trainings = [point.runs[5].training for point in points]
    assert [(one.num_rounds, one.learning_rate) for one in trainings] == [
        (3, 0.1),
        (3, 0.01),
    ]
