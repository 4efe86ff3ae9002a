from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict

from knnper.transport.messages import (
    Introduction,
    introduction_content,
    read_introduction,
)


def read(**fields: Any) -> Introduction:
    return read_introduction(RecordDict({"introduction": ConfigRecord(fields)}))


def test_what_is_said_is_read() -> None:
    said = Introduction("site-a", False, 1, 2, 3)
    assert read_introduction(introduction_content(said)) == said


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": "../x"},
        {"name": "a" * 256},
        {"name": "a\n"},
        {"name": 7},
        {"name": "a", "num_train": "5"},
        {"name": "a", "num_train": b"5"},
        {"name": "a", "num_test": -1},
        {"name": "a", "num_test": 2**53 + 1},
        {"name": "a", "num_validation": True},
        {"name": "a", "train": 1},
        {"name": "a", "more": 1},
    ],
)
def test_what_cannot_be_is_a_problem(fields: dict[str, Any]) -> None:
    said = read(**fields)
    assert (said.name, said.num_train) == ("", 0)
    assert said.problem


def test_a_problem_is_one_short_line() -> None:
    said = read(name="a", problem="x\n2026 INFO run finished" + "y" * 999)
    assert said.problem.startswith("x\\n2026 INFO")
    assert len(said.problem) == 500
