from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import Field

from knnper.errors import Problem
from knnper.experiment import Settings, UnitInterval, parse_settings


@dataclass(frozen=True)
class Grid(Settings):
    weights: Annotated[tuple[UnitInterval, ...], Field(min_length=1)]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([], ["memory.weights: found [], expected a list of at least 1"]),
        ([2], ["memory.weights.0: found 2, expected a number from 0 to 1"]),
    ],
)
def test_a_list_has_one_problem_for_one_mistake(
    weights: list[float], expected: list[str]
) -> None:
    problems: list[Problem] = []
    assert parse_settings(Grid, {"weights": weights}, "memory", problems) is None
    assert [str(problem) for problem in problems] == expected
