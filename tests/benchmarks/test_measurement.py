"""A benchmark's line, and turns that are taken."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.measurement import Measurement, Turns, in_turn, seconds_of

pytestmark = pytest.mark.integration


def test_line_holds_medians_and_the_range_of_the_values() -> None:
    measurement = Measurement(
        "speed", [3.0, 1.0, 2.00004], [8.0, 4.0], "of another", {"clients": 5}
    )
    assert json.loads(measurement.as_json()) == {
        "name": "speed",
        "value": 2.0,
        "baseline": 6.0,
        "spread": [1.0, 3.0],
        "repetitions": 3,
        "baseline_is": "of another",
        "clients": 5,
    }
    assert "\n" not in measurement.as_json()


def test_the_first_turn_of_both_is_not_counted() -> None:
    order: list[str] = []

    def taking(name: str) -> float:
        order.append(name)
        return float(len(order))

    turns = in_turn(lambda: taking("ours"), lambda: taking("bare"), repetitions=2)
    assert order == ["ours", "bare"] * 3
    assert turns == Turns(values=[3.0, 5.0], baselines=[4.0, 6.0])


def test_seconds_are_those_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5])
    fake = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("benchmarks.measurement.time", fake)
    done: list[str] = []
    assert seconds_of(lambda: done.append("work")) == 2.5
    assert done == ["work"]
