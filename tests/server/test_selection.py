"""ClientSelection of clients by utility: by hand, and in whole runs."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from knnper.errors import ConfigError
from knnper.experiment import (
    TrainingSettings,
    UtilitySelection,
)
from knnper.files import JsonLines
from knnper.seeding import RandomKey
from knnper.server.observer import Observer
from knnper.server.run_folder import RunFolder
from knnper.server.selection import ByUtility, Uniform, gain, selection_of
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.engines import simulate
from knnper.simulation.workbench import open_workbench
from tests.server.test_schedule import run, state_of

KEY = RandomKey(0)
CLIENTS = [f"{number:02d}" for number in range(20)]
GREEDY: dict[str, Any] = {
    "exploration": 0.0,
    "min_exploration": 0.0,
    "staleness_weight": 0.0,
}


def by_utility(durations: dict[str, float] | None = None, **given: Any) -> ByUtility:
    return ByUtility(UtilitySelection(**given), KEY, durations or {})


def test_utility_is_examples_times_loss() -> None:
    assert gain(4, 0.5) == 2.0
    assert gain(4, math.nan) == gain(4, -1.0) == 0.0


def test_utilities_by_hand() -> None:
    """U of 1, 2, 3 is divided by the 95 % quantile, 2.9, and so is 3 but for that."""
    selection = by_utility({"a": 2.0, "b": 4.0, "c": 8.0}, preferred_quantile=0.5)
    selection.learn([{"a": 5.0, "b": 2.0}, {"a": 1.0, "c": 3.0}])
    selection.draw(["a", "b", "c", "d"], 2, 3)
    utilities = selection.utilities(["a", "b", "c", "d"], 3)
    bonus = 0.1 * math.log(3)
    assert utilities == {
        "a": pytest.approx(1 / 2.9 + math.sqrt(bonus / 2)),
        "b": pytest.approx(2 / 2.9 + math.sqrt(bonus / 1)),
        # It needs twice the preferred 4 seconds: a quarter.
        "c": pytest.approx((1 + math.sqrt(bonus / 2)) / 4),
    }


@pytest.mark.parametrize(
    ("server_round", "expected"), [(1, 0.9), (2, 0.45), (3, 0.225), (4, 0.2), (9, 0.2)]
)
def test_exploration_decays(server_round: int, expected: float) -> None:
    selection = by_utility(exploration=0.9, exploration_decay=0.5, min_exploration=0.2)
    assert selection.exploration(server_round) == pytest.approx(expected)


def test_without_exploration_those_with_the_most_are_drawn() -> None:
    selection = by_utility(**GREEDY)
    selection.learn(
        [{client: float(number) for number, client in enumerate(CLIENTS, 1)}]
    )
    # 19 and 20 count as 0.997 and 1; 95 % of the former is 0.948, more than 18's 0.945.
    assert selection.draw(CLIENTS, 2, 2) == ["18", "19"]


def test_the_likelier_the_more_is_learnt_of_it() -> None:
    """Of two that are within 5 % of each other one is drawn: by their shares."""
    gains = [{"a": 98.0, "b": 100.0, "c": 50.0}]
    counts: Counter[str] = Counter()
    for seed in range(2000):
        selection = ByUtility(UtilitySelection(**GREEDY), RandomKey(seed))
        selection.learn(gains)
        counts.update(selection.draw(["a", "b", "c"], 1, 2))
    assert set(counts) == {"a", "b"}
    assert counts["a"] / 2000 == pytest.approx(98 / 198, abs=0.035)


def test_part_of_a_round_is_drawn_of_all_others() -> None:
    """A third of 6 by exploration: over many rounds all are met."""
    selection = by_utility(
        exploration=0.34, exploration_decay=1.0, staleness_weight=0.0
    )
    best = dict.fromkeys(CLIENTS[:4], 1.0)
    selection.learn([best] * 100)
    met: Counter[str] = Counter()
    for server_round in range(2, 101):
        drawn = selection.draw(CLIENTS, 6, server_round)
        assert len(set(drawn)) == 6
        assert drawn == sorted(drawn)
        assert set(CLIENTS[:4]) <= set(drawn)
        met.update(drawn)
    assert set(met) == set(CLIENTS)


@pytest.mark.parametrize("client_gain", [0.0, 2.0])
def test_full_exploration_is_uniform(client_gain: float) -> None:
    selection = by_utility(exploration=1.0, exploration_decay=1.0)
    selection.learn([dict.fromkeys(CLIENTS, client_gain)] * 10)
    for server_round in range(1, 11):
        expected = Uniform(KEY).draw(CLIENTS, 7, server_round)
        assert selection.draw(CLIENTS, 7, server_round) == expected


def test_where_nothing_is_learnt_of_anyone_all_are_as_likely() -> None:
    selection = by_utility(**GREEDY)
    selection.learn([dict.fromkeys(CLIENTS, 0.0)] * 60)
    met = {
        name for number in range(2, 60) for name in selection.draw(CLIENTS, 3, number)
    }
    assert met == set(CLIENTS)


def test_uniform_is_the_default() -> None:
    assert selection_of(TrainingSettings(), KEY) == Uniform(KEY)


UTILITY = {"name": "utility", "exploration": 0.5, "exploration_decay": 0.9}
SLOW: dict[str, Any] = {"devices": {"speed_spread": 100.0, "available": 0.8}}


@pytest.mark.parametrize(
    "devices", [{}, pytest.param(SLOW, marks=pytest.mark.integration)]
)
def test_a_run_goes_on_with_the_same_choices(
    tmp_path: Path, devices: dict[str, Any]
) -> None:
    settings = {"num_rounds": 6, "participation": 0.5, **devices}
    whole = run(tmp_path, "whole", selection=UTILITY, **settings)
    again = run(tmp_path, "again", selection=UTILITY, **settings)
    assert state_of(again) == state_of(whole)
    # What was learnt is a line a round, and no part of each checkpoint.
    gains = JsonLines(again.checkpoints / "gains.jsonl")
    kept_gains = gains.read()
    assert len(kept_gains) == 6
    manifest = (again.checkpoints / "round-000006/manifest.json").read_text()
    assert json.loads(manifest)["history"]["num_gains"] == 6
    assert "gains" not in json.loads(manifest)["history"]
    again.go_back(3)
    _resume(again)
    assert gains.read() == kept_gains
    gains.replace(kept_gains[:5])  # of a disc that lost some
    (again.path / "results.json").unlink()
    _resume(again)
    assert gains.read() == kept_gains
    assert state_of(again) == state_of(whole)
    plain = run(tmp_path, "plain", **settings)
    assert state_of(plain) != state_of(whole)
    all_explored = {**UTILITY, "exploration": 1.0, "exploration_decay": 1.0}
    explored = run(tmp_path, "explored", selection=all_explored, **settings)
    assert state_of(explored) == state_of(plain)


def _resume(folder: RunFolder) -> None:
    bench = open_workbench(folder.experiment(experiment_catalogue()))
    simulate(bench, folder, Observer(), ["test"])


def test_buffered_steps_draw_one_by_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.selection: found utility with"):
        run(
            tmp_path,
            "none",
            devices={},
            timing={"name": "buffered"},
            selection={"name": "utility"},
        )
