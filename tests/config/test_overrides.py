import re

import pytest

from knnper.errors import Problem
from knnper.experiment import Override, apply_overrides, parse_overrides


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("training.num_rounds=50", ("training", "num_rounds"), 50),
        ("training.learning_rate=1e-2", ("training", "learning_rate"), 0.01),
        ("method={name: fedavg}", ("method",), {"name": "fedavg"}),
        ("a.b=[0, 1]", ("a", "b"), [0, 1]),
        ("a=x=y", ("a",), "x=y"),
        ("a=", ("a",), None),
        (" a . b = 1", ("a", "b"), 1),
    ],
)
def test_parse(text: str, path: tuple[str, ...], value: object) -> None:
    problems: list[Problem] = []
    assert parse_overrides([text], problems) == (Override(path, value),)
    assert problems == []


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("training", "override", 'expected KEY=VALUE, .*found "training"'),
        ("=3", "override", "expected KEY=VALUE"),
        ("a..b=3", "override", "expected KEY=VALUE"),
        ("a.b=[1", "a.b", r'found "\[1", expected a YAML value: invalid YAML'),
    ],
)
def test_malformed(text: str, place: str, message: str) -> None:
    problems: list[Problem] = []
    good = parse_overrides([text, "a=1"], problems)
    assert good == (Override(("a",), 1),)
    assert [problem.place for problem in problems] == [place]
    assert re.search(message, problems[0].message)


def test_sections_are_created_and_the_last_wins() -> None:
    problems: list[Problem] = []
    document = {"a": {"b": 1}, "empty": None}
    overrides = [
        Override(("a", "c"), 2),
        Override(("a", "c"), 3),
        Override(("new", "deep", "x"), 4),
        Override(("empty", "x"), 5),
    ]
    result = apply_overrides(document, overrides, problems)
    assert result == {
        "a": {"b": 1, "c": 3},
        "new": {"deep": {"x": 4}},
        "empty": {"x": 5},
    }
    assert document == {"a": {"b": 1}, "empty": None}
    assert problems == []


def test_a_path_through_a_value() -> None:
    problems: list[Problem] = []
    overrides = [Override(("a", "b", "c"), 2), Override(("grid", "0"), 2)]
    result = apply_overrides({"a": {"b": 1}, "grid": [1]}, overrides, problems)
    assert result == {"a": {"b": 1}, "grid": [1]}
    assert [str(problem) for problem in problems] == [
        "a.b.c: a.b is 1 and holds no settings; set a.b as a whole",
        "grid.0: grid is [1] and holds no settings; set grid as a whole",
    ]
