"""The file of a sweep: its points, the random ones too, and all errors at once."""

import math
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import ConfigError
from knnper.experiment import Experiment
from knnper.simulation.batches.comparison import (
    Comparison,
    read_comparison,
)
from knnper.simulation.batches.grid import (
    RandomSettings,
    RangeSettings,
    draw_points,
)
from knnper.simulation.batches.points import Point
from knnper.simulation.batches.runner import folder_of
from knnper.yaml_text import dump_yaml
from tests.simulation.batches.small_comparison import plan
from tests.simulation.batches.small_sweep import (
    BASE,
    FRACTION,
    NEIGHBORS,
    PARTITION,
    read,
)

RATE = "training.learning_rate"


def test_every_combination_is_a_point_the_last_key_fastest(tmp_path: Path) -> None:
    sweep = read(tmp_path, grid={FRACTION: [0.5, 1.0], NEIGHBORS: [1, 5]})
    assert [tuple(point.values.values()) for point in sweep.points] == [
        (0.5, 1),
        (0.5, 5),
        (1.0, 1),
        (1.0, 5),
    ]
    assert len(sweep.experiments) == 8


def test_the_command_line_can_change_what_is_shown_and_how(tmp_path: Path) -> None:
    changes = ["evaluate_on=validation", "seeds=[7]", "training.batch_size=8"]
    sweep = read(tmp_path, *changes, f"x={NEIGHBORS}")
    assert sweep.settings.x == NEIGHBORS
    assert sweep.overrides == ("training.batch_size=8",)
    experiment = sweep.points[0].runs[7]
    assert experiment.partition.settings.evaluate_on == "validation"  # type: ignore[attr-defined]


def test_the_base_may_be_an_experiment_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/one.yaml").write_text(dump_yaml({"name": "one", **BASE}))
    sweep = read(
        tmp_path,
        base=None,
        experiment="other/one.yaml",
        set={"training.momentum": 0.5, "training.batch_size": 8},
        variants={"a": {"training": {"batch_size": 4}}},
    )
    first = sweep.experiments[0]
    # What is nearer to the point wins.
    assert (first.training.momentum, first.training.batch_size) == (0.5, 4)
    assert first.name == "small"
    assert first.training.learning_rate == 0.1


def test_variants_replace_the_method_and_change_the_rest(tmp_path: Path) -> None:
    base = {**BASE, "personalization": {"num_neighbors": 3}}
    variants = {
        "memory": {"title": "kNN-Per"},
        "mean": {"method": {"name": "fedavg"}, "training": {"momentum": 0.5}},
        "both": {
            "method": {"name": "fedavg"},
            "personalization": {"name": "knn"},
            "model": {"embedding_dim": 8},
            "set": {"training.batch_size": 4, "personalization.kernel_scale": 2.0},
        },
    }
    sweep = read(tmp_path, base=base, grid={}, variants=variants)
    memory, mean, both = (point.runs[1] for point in sweep.points)
    assert [point.title for point in sweep.points] == ["kNN-Per", "mean", "both"]
    assert memory.personalization.settings.num_neighbors == 3  # type: ignore[attr-defined]
    # The base's memory is kNN-Per's, not that of another method.
    assert mean.personalization.name == "none"
    assert (mean.training.momentum, mean.training.batch_size) == (0.5, 16)
    assert both.model.settings.embedding_dim == 8  # type: ignore[attr-defined]
    assert both.personalization.settings.kernel_scale == 2.0  # type: ignore[attr-defined]
    assert (both.training.momentum, both.training.batch_size) == (0.0, 4)


KEYS: dict[str, Any] = {
    RATE: RangeSettings(0.001, 1.0, "log"),
    NEIGHBORS: RangeSettings(1, 30),
    "method.name": ["fedavg", "knn_per"],
}


def test_random_points_are_the_same_again_and_the_first_of_more() -> None:
    few = draw_points(RandomSettings(3, KEYS, seed=7))
    many = draw_points(RandomSettings(6, KEYS, seed=7))
    alone = draw_points(RandomSettings(3, {RATE: KEYS[RATE]}, seed=7))
    assert many[:3] == few
    assert [point[RATE] for point in few] == [point[RATE] for point in alone]
    assert len({point[RATE] for point in many}) == 6
    assert draw_points(RandomSettings(3, KEYS, seed=8)) != few


def test_random_points_fill_their_ranges() -> None:
    points = draw_points(RandomSettings(400, KEYS))
    rates = [math.log10(point[RATE]) for point in points]
    # Uniform on [-3, 0]: mean -1.5, and a third in each order of magnitude.
    assert sum(rates) / 400 == pytest.approx(-1.5, abs=0.15)
    assert sum(rate < -2 for rate in rates) / 400 == pytest.approx(1 / 3, abs=0.1)
    assert {point[NEIGHBORS] for point in points} == set(range(1, 31))
    assert {point["method.name"] for point in points} == {"fedavg", "knn_per"}


@given(low=st.floats(1e-6, 1e3), factor=st.floats(1.001, 1e6), is_log=st.booleans())
@settings(max_examples=50, deadline=None)
def test_random_numbers_stay_in_range(low: float, factor: float, is_log: bool) -> None:
    scale: Literal["log", "linear"] = "log" if is_log else "linear"
    values = RangeSettings(low, low * factor, scale)
    whole = RangeSettings(math.ceil(low), math.ceil(low) + math.ceil(factor), scale)
    points = draw_points(RandomSettings(3, {RATE: values, NEIGHBORS: whole}))
    assert len(points) == 3
    for point in points:
        assert low <= point[RATE] <= low * factor
        assert isinstance(point[NEIGHBORS], int)
        assert whole.low <= point[NEIGHBORS] <= whole.high


def test_a_key_inside_a_section_that_is_set_may_be_varied(tmp_path: Path) -> None:
    section = {"name": "iid", "num_clients": 4}
    grid = {"partition.unseen_fraction": [0.0, 0.5]}
    override = "partition={name: iid, num_clients: 4}"
    for sweep in (
        read(tmp_path, grid=grid, set={"partition": section}),
        read(tmp_path, override, grid=grid),
    ):
        fractions = [
            experiment.partition.settings.unseen_fraction  # type: ignore[attr-defined]
            for experiment in sweep.experiments[::2]
        ]
        assert fractions == [0.0, 0.5]


def test_what_is_wrong_is_said_of_every_variant_once(tmp_path: Path) -> None:
    variants = {"a": {"training": {"lost": 1}}, "b": {"method": {"name": "lost"}}}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, variants=variants)
    assert [problem.place for problem in caught.value.problems] == [
        "variants.a: training.lost",
        "variants.b: method.name",
    ]


IN_SECTION: dict[str, Any] = {"grid": {"training": [{}]}}
DRAWN = {"num_points": 2, "keys": {RATE: {"low": 2, "high": 1}}}
LOG = {"num_points": 2, "keys": {RATE: {"low": 0, "high": 1, "scale": "log"}}}
WIDE = {"model": {"embedding_dim": 8}}
RATED = {"training": {"learning_rate": 1}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": None}, "base: expected the sections of an experiment, or experiment"),
        ({"experiment": "one.yaml"}, "base: expected .* one of the two"),
        ({"base": None, "experiment": "lost.yaml"}, r"lost\.yaml: there is no such"),
        ({"name": "no/name"}, "name: found 'no/name'"),
        ({"variants": {"a b": {}}}, "variants.a b: found"),
        ({"seeds": []}, "seeds"),
        ({"seeds": [1, 1]}, "seeds: .* expected each one once"),
        ({"grid": {NEIGHBORS: []}}, "grid.personalization.num_neighbors"),
        ({"vary": {}}, "vary: unknown setting"),
        ({"grid": {"run.seed": [1, 2]}}, "grid run.seed: the sweep itself"),
        ({"grid": {"run": [{"seed": 3}]}}, "grid run.seed: the sweep itself"),
        ({"grid": {NEIGHBORS: [0]}}, "personalization.num_neighbors: found 0"),
        ({"grid": {"training.rate": [1]}}, "training.rate: unknown"),
        ({"variants": {"a": {"method": {"name": "fedaverage"}}}}, "did you mean"),
        ({"set": {NEIGHBORS: 3}}, f"set {NEIGHBORS}: is varied too; take"),
        ({"variants": {"a": {"set": {NEIGHBORS: 3}}}}, "variants.a.set .* varied too"),
        ({"variants": {"a": RATED}, "grid": {RATE: [1]}}, f"a {RATE}: is varied too;"),
        ({**IN_SECTION, "set": {RATE: 1}}, f"set {RATE}: is varied too with training;"),
        ({**IN_SECTION, "set": RATED}, f"set {RATE}: is varied too with training;"),
        ({**IN_SECTION, "variants": {"a": RATED}}, "a .* is varied too with training;"),
        ({"grid": {"training": [{}], RATE: [1]}}, f"{RATE}: is varied with training"),
        ({"set": {"name": "other"}}, "set name: the sweep itself"),
        ({"set": {"run.seed": 3}}, "set run.seed: the sweep itself"),
        (
            {"evaluate_on": "validation", "set": {"partition.validation_fraction": 0}},
            "partition.validation_fraction: found 0, expected more",
        ),
        ({"variants": {"a": WIDE, "b": {"title": "a"}}}, "b.title: found 'a', as a"),
        ({"variants": {"a": {}, "b": {}}}, "the point b .* is the same run as .* a "),
        ({"grid": {"run.num_workers": [1, 2]}}, "changes no result; take one of"),
        ({"grid": {NEIGHBORS: [1, 1]}}, "changes no result; take one of the two out"),
        ({"set": {"run.threads_per_worker": "auto"}}, "found 'auto', expected a num"),
        ({"set": {"training.precision": "auto"}}, "found auto, expected float32 or bf"),
        ({"x": "training.momentum"}, "x: .* which is not varied; .*num_neighbors"),
        ({"x": NEIGHBORS, "series": NEIGHBORS}, "series: .* expected x to be another"),
        ({"series": NEIGHBORS}, "series: .* expected x to be another"),
        ({"y": "accuracy_wieghted"}, "did you mean 'accuracy_weighted'"),
        ({"group": "everybody"}, "group: found"),
        (
            {"x": NEIGHBORS, "grid": {NEIGHBORS: [1, 2], FRACTION: [0.5, 1.0]}},
            "leave out partition.unseen_train_fraction",
        ),
        ({"x": NEIGHBORS, "variants": {"a": {}, "b": {}}}, "leave out variant"),
        ({"random": DRAWN}, "random: found grid too"),
        ({"grid": {}, "random": {"num_points": 2, "keys": {}}}, "random.keys"),
        ({"grid": {}, "random": DRAWN}, f"keys.{RATE}: .* low to be less than high"),
        ({"grid": {}, "random": LOG}, "low to be greater than 0 with scale = log"),
    ],
)
def test_a_wrong_sweep(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("override", "grid", "message"),
    [
        (f"{NEIGHBORS}=3", {NEIGHBORS: [1, 5]}, f"override {NEIGHBORS}: is varied"),
        (f"{RATE}=1", {"training": [{}]}, f"override {RATE}: is varied too with train"),
        ("run.seed=3", {}, "override run.seed: the sweep itself"),
        ("partition.evaluate_on=validation", {}, "override partition.evaluate_on"),
        ("lost", {}, "expected KEY=VALUE"),
        ("seeds=3", {}, "seeds: found 3"),
    ],
)
def test_an_override_must_leave_the_sweep_one(
    tmp_path: Path, override: str, grid: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, override, grid=grid)


# The file of a comparison: candidates, titles, and all errors at once.


FEDAVG: dict[str, Any] = {"method": {"name": "fedavg"}}
SHARED = {name: one for name, one in BASE.items() if name != "method"}


def compare(tmp_path: Path, *overrides: str, **changes: Any) -> Comparison:
    usual = {"rows": {"mean": FEDAVG}, "grid": {RATE: [0.1, 0.01]}, "seeds": [5, 6]}
    return plan(tmp_path, *overrides, **{**usual, "tuning_seed": 7, **changes})


def rows_of(tmp_path: Path, *overrides: str, **changes: Any) -> list[list[Point]]:
    return list(compare(tmp_path, *overrides, **changes).variants.values())


def tuning_of(point: Point) -> Experiment:
    assert point.tuning is not None
    return point.tuning


def test_a_row_is_the_product_of_its_grid_and_the_common_one(tmp_path: Path) -> None:
    grid = {"personalization.num_epochs": [1, 3]}
    rows = {"mean": FEDAVG, "tuned": {"method": {"name": "fedavg_plus"}, "grid": grid}}
    mean, tuned = rows_of(tmp_path, rows=rows)
    assert [dict(point.values) for point in mean] == [
        {"training.learning_rate": 0.1},
        {"training.learning_rate": 0.01},
    ]
    assert [tuple(point.values.values()) for point in tuned] == [
        (0.1, 1),
        (0.1, 3),
        (0.01, 1),
        (0.01, 3),
    ]


def test_candidates_are_experiments(tmp_path: Path) -> None:
    (points,) = rows_of(tmp_path, "training.batch_size=8")
    point, tuning = points[1], tuning_of(points[1])
    assert (tuning.training.learning_rate, tuning.training.batch_size) == (0.01, 8)
    assert tuning.run.seed == 7
    assert tuning.partition.settings.evaluate_on == "validation"  # type: ignore[attr-defined]
    for seed in (5, 6):
        experiment = point.runs[seed]
        assert (experiment.run.seed, experiment.run.engine) == (seed, "serial")
        assert experiment.partition.settings.evaluate_on == "test"  # type: ignore[attr-defined]
    experiments = [tuning, *point.runs.values()]
    assert len({folder_of(experiment, tmp_path) for experiment in experiments}) == 3


def test_the_tuning_may_train_less(tmp_path: Path) -> None:
    shorter = {"training.num_rounds": 1, "training.momentum": 0.5}
    (points,) = rows_of(tmp_path, tuning_set=shorter)
    tuning, tested = tuning_of(points[1]), points[1].runs[5]
    assert (tuning.training.num_rounds, tuning.training.momentum) == (1, 0.5)
    assert (tested.training.num_rounds, tested.training.momentum) == (2, 0.0)
    assert tuning.training.learning_rate == tested.training.learning_rate == 0.01
    # An override goes before what differs in the tuning.
    (points,) = rows_of(tmp_path, "training.num_rounds=4", tuning_set=shorter)
    for experiment in (tuning_of(points[0]), points[0].runs[5]):
        assert experiment.training.num_rounds == 4


def test_a_row_that_follows_chooses_its_own_grid_afterwards(tmp_path: Path) -> None:
    grid = {"personalization.num_epochs": [1, 3]}
    tuned = {"method": {"name": "fedavg_plus"}, "follows": "mean", "grid": grid}
    comparison = compare(tmp_path, rows={"mean": FEDAVG, "tuned": tuned})
    assert [*comparison.to_choose_from({}, following=False)] == ["mean"]
    best = {"mean": comparison.variants["mean"][1]}
    (points,) = comparison.to_choose_from(best, following=True).values()
    assert [dict(point.values) for point in points] == [
        {RATE: 0.01, "personalization.num_epochs": epochs} for epochs in (1, 3)
    ]
    best["tuned"] = points[1]
    assert comparison.tested_with(best) == [best["mean"], points[1]]


@pytest.mark.parametrize("leader", ["none", "tuned"])
def test_what_is_followed_must_be_a_row_that_follows_none(
    tmp_path: Path, leader: str
) -> None:
    tuned = {"method": {"name": "fedavg_plus"}, "follows": leader}
    with pytest.raises(ConfigError, match=f"rows.tuned.follows: found '{leader}'"):
        compare(tmp_path, rows={"mean": FEDAVG, "tuned": tuned})


def extending(tmp_path: Path, **document: Any) -> Comparison:
    """Return a comparison that extends one of the rows mean and tuned."""
    tuned = {"method": {"name": "fedavg_plus"}, "grid": {RATE: [0.5]}}
    compare(tmp_path, rows={"mean": FEDAVG, "tuned": tuned})
    path = tmp_path / "more.yaml"
    path.write_text(dump_yaml({"name": "more", "extends": "small.yaml", **document}))
    return read_comparison(path)


def test_a_comparison_says_only_what_it_has_otherwise(tmp_path: Path) -> None:
    comparison = extending(
        tmp_path,
        rows={"tuned": None, "memory": {"method": {"name": "knn_per"}}},
        base={"training": {"batch_size": 4}, "model": {"name": "mlp"}},
        grid={"training.momentum": [0.0, 0.5]},
    )
    assert (comparison.name, comparison.seeds) == ("more", (5, 6))
    assert [*comparison.variants] == ["mean", "memory"]
    values = [dict(point.values) for point in comparison.variants["memory"]]
    assert values == [
        {RATE: rate, "training.momentum": momentum}
        for rate in (0.1, 0.01)
        for momentum in (0.0, 0.5)
    ]
    experiment = comparison.points[0].runs[5]
    assert experiment.training.batch_size == 4
    assert experiment.training.num_rounds == 2
    assert experiment.model.name == "mlp"
    assert experiment.partition.settings.num_clients == 5  # type: ignore[attr-defined]


def test_what_a_row_follows_in_is_not_in_its_own_grid(tmp_path: Path) -> None:
    tuned = {
        "method": {"name": "fedavg_plus"},
        "follows": "mean",
        "grid": {RATE: [0.5]},
    }
    with pytest.raises(ConfigError, match=f"rows.tuned.grid: found {RATE}"):
        compare(tmp_path, rows={"mean": FEDAVG, "tuned": tuned})


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"rows": ["mean"]}, "rows"),
        ({"base": "digits"}, "base"),
        ({"base": {"data": None}}, "base.data"),
        ({"base": {"data": "digits"}}, "base.data"),
    ],
)
def test_what_is_no_section_is_refused_where_another_is_extended(
    tmp_path: Path, document: dict[str, Any], place: str
) -> None:
    with pytest.raises(ConfigError, match=place):
        extending(tmp_path, **document)


def test_a_comparison_that_extends_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"more\.yaml, which extends this file"):
        extending(tmp_path, extends="more.yaml")
    with pytest.raises(ConfigError, match="there is no such file"):
        extending(tmp_path, extends="none.yaml")


def test_each_row_can_be_shown_with_a_memory_too(tmp_path: Path) -> None:
    rows = {
        "mean": {"method": {"name": "fedavg"}, "grid": {"training.momentum": [0, 0.5]}},
        "named": {"method": {"name": "fedem"}, "title": "Three models"},
        "tuned": {"method": {"name": "fedavg"}, "personalization": {"name": "protonn"}},
    }
    rows_found = rows_of(tmp_path, rows=rows, each_also_with={"name": "knn"})
    assert [row[0].variant for row in rows_found] == [*rows, "mean-knn", "named-knn"]
    assert [row[0].title for row in rows_found[-2:]] == [
        "FedAvg + kNN",
        "Three models + kNN",
    ]
    assert len(rows_found[-2]) == 4
    assert tuning_of(rows_found[-2][0]).personalization.name == "knn"
    # kNN-Per is not shown twice.
    wide = {**FEDAVG, "model": {"embedding_dim": 8}, "title": "FedAvg of 8"}
    memory = {"method": {"name": "knn_per"}}
    rows = {"mean": FEDAVG, "memory": memory, "wide": wide}
    rows_found = rows_of(tmp_path, rows=rows, each_also_with={"name": "knn"})
    assert [row[0].variant for row in rows_found] == [
        "mean",
        "memory",
        "wide",
        "wide-knn",
    ]


def test_what_chooses_nothing_needs_no_validation_data(tmp_path: Path) -> None:
    grid = {"training.learning_rate": [0.1]}
    (points,) = rows_of(tmp_path, "partition.validation_fraction=0", grid=grid)
    tested = points[0].runs[5].partition.settings
    assert tested.validation_fraction == 0  # type: ignore[attr-defined]


UNHELD = {**PARTITION, "validation_fraction": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": "median"}, "'median', which is no row; did you mean 'mean'"),
        ({"rows": {}}, "rows"),
        ({"rows": {"a b": FEDAVG}}, "rows.a b"),
        ({"grid": {"run.seed": [1, 2]}}, "grid run.seed: the comparison itself"),
        ({"tuning_set": {RATE: 0.5}}, f"tuning_set {RATE}: is varied too; take"),
        ({"tuning_set": {"training": {"learning_rate": 1}}}, f"{RATE}: is varied too;"),
        ({"tuning_set": {"training.rounds": 1}}, "rows.mean: training.rounds: unknown"),
        ({"base": {**SHARED, **FEDAVG}}, "base.method: unknown"),
        ({"base": {**SHARED, "training": None}}, "base.training: found null"),
        ({"base": {**SHARED, "model": "tiny_cnn"}}, "base.model: found .tiny_cnn."),
        (
            {"base": {**SHARED, "partition": UNHELD}},
            "rows.mean: partition.validation_fraction: found 0, expected more",
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
    ],
)
def test_a_wrong_comparison(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(tmp_path, **changes)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rate=0.5", "override training.learning_rate: is varied"),
        ("training={learning_rate: 3}", "override training.learning_rate: is varied"),
        ("partition.validation_fraction=0", "validation_fraction: found 0, expected"),
        ("name=other", "override name: the comparison itself"),
        ("partition.evaluate_on=validation", "override partition.evaluate_on"),
    ],
)
def test_a_wrong_override_of_one(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(tmp_path, override)
