import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from knnper.simulation.reports.charts import (
    as_svg,
    draw_partition,
    first_counts,
    ordered_counts,
)
from knnper.simulation.reports.runs import load_run, setups_of
from knnper.simulation.workbench import ClientCounts, LabelCounts
from tests.simulation.reporting.made_runs import made_run


def client(name: str, seen: bool, *train: int) -> ClientCounts:
    return ClientCounts(name, seen, train, validation=(1, 0, 0), test=(9, 9, 9))


COUNTS = LabelCounts(
    ("cat", "dog", "owl"),
    (
        client("0", False, 0, 5, 0),
        client("1", True, 0, 0, 4),
        client("2", True, 2, 0, 0),
        client("3", True, 6, 1, 0),
    ),
)


def test_clients_are_ordered_by_group_and_most_frequent_label() -> None:
    by_class, num_seen = ordered_counts(COUNTS)
    # Clients 3, 2, 1 and 0; training and validation together, without the test split.
    expected = [[7, 3, 1, 1], [1, 0, 0, 5], [0, 0, 4, 0]]
    np.testing.assert_array_equal(by_class, expected)
    assert num_seen == 3


def test_the_first_run_that_kept_its_split_is_drawn(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    setups = setups_of(map(load_run, paths))
    assert first_counts(setups) is None
    assert draw_partition(setups) is None
    (paths[1] / "partition.json").write_text(json.dumps(asdict(COUNTS)))
    assert first_counts(setups) == ("1", COUNTS)
    picture = draw_partition(setups)
    assert picture is not None
    assert picture.alternative == (
        "The split of the run 1: 4 clients, 3 of them seen, with 3 to 8 training and "
        "validation examples, median 5.5; a client has 2 of the 3 labels (median)."
    )


def test_labels_are_drawn_literally(tmp_path: Path) -> None:
    one = ClientCounts("0", True, (1, 1), (0, 0), (0, 0))
    counts = LabelCounts(("$10 to $20_", "bell\x07"), (one,))
    path = made_run(tmp_path / "run")
    (path / "partition.json").write_text(json.dumps(asdict(counts)))
    picture = draw_partition(setups_of([load_run(path)]))
    assert picture is not None
    svg = as_svg(picture, "split")
    assert "$10 to $20_" in svg
    assert ">bell <" in svg


def test_many_labels_are_not_all_named(tmp_path: Path) -> None:
    names = tuple(f"label {number}" for number in range(62))
    one = ClientCounts("0", True, (1,) * 62, (0,) * 62, (0,) * 62)
    path = made_run(tmp_path / "run")
    counts = asdict(LabelCounts(names, (one, one)))
    (path / "partition.json").write_text(json.dumps(counts))
    picture = draw_partition(setups_of([load_run(path)]))
    assert picture is not None
    named = [text.get_text() for text in picture.figure.axes[1].get_yticklabels()]
    assert named == list(names[::3])
