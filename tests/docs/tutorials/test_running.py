"""What can go wrong while a page is run is told."""

from pathlib import Path
from typing import Any

import pytest

from tests.docs.tutorials.running import (
    Listing,
    difference,
    run_listings,
)
from tests.processes import Commands

WRITTEN = """progress
│ method │ average │ seconds │
│ FedAvg │ 72.6 %  │ 26.9    │
│ Local  │ 30.0 %  │ 1.0     │
sha256: 00ff

done
"""


@pytest.mark.parametrize(
    "shown",
    [
        "│ FedAvg │ 72.6 % │ 26.9 │\n",
        "│ FedAvg │ 70.1 % │ … │\n",
        "progress\n…\ndone\n",
        "sha256: …\n\ndone\n",
        "│ method │ average │ seconds │\n…\n│ Local  │ … │\n",
        "…\nprogress\n",
    ],
)
def test_matching_output_is_accepted(shown: str) -> None:
    assert difference(shown, WRITTEN) is None


@pytest.mark.parametrize(
    "shown",
    [
        "│ FedAvg │ 62.6 % │ … │\n",
        "│ FedAvg │ 72 % │ … │\n",
        "│ FedProx │ 72.6 % │ … │\n",
        "progress\ndone\n",
        "done\n…\nprogress\n",
        "prog\n",
        "sha256: 00fe\n",
    ],
)
def test_differing_output_is_rejected(shown: str) -> None:
    assert difference(shown, WRITTEN) is not None


@pytest.mark.parametrize(
    ("shown", "near", "far"),
    [
        ("took 1000.0 s\n", "took 1049.0 s\n", "took 1051.0 s\n"),
        ("0.9604\n", "0.9208\n", "0.9008\n"),
        ("a 50.0\n", "a 1.0\na 50.0\n", "a 1.0\n"),
    ],
)
def test_numbers_may_differ_by_a_twentieth(shown: str, near: str, far: str) -> None:
    assert difference(shown, near) is None
    assert difference(shown, far) is not None


@pytest.mark.parametrize(
    ("listings", "problem"),
    [
        ([(3, "sh", "kept=1\n"), (7, "sh", "echo $kept\n", None, "1\n")], None),
        (
            [(1, "yaml", "x\n", "a/b.yaml"), (5, "sh", "cat a/b.yaml\n", None, "x\n")],
            None,
        ),
        ([(3, "sh", "echo one\n", None, "two\n")], "line 3: shown:\ntwo"),
        ([(3, "sh", "false\ntrue\n")], "line 3: a command failed:.*false"),
        ([(3, "sh", "exit\n"), (5, "sh", "ls\n", None, "")], "line 5: it was not"),
        ([(3, "diff", "-a\n", "none.py")], "line 3: a command failed"),
        ([(3, "sh", "echo Error; false\n", None, "Error\n")], None),
    ],
)
def test_problems_are_reported(
    tmp_path: Path,
    commands: Commands,
    listings: list[tuple[Any, ...]],
    problem: str | None,
) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    problems = "\n".join(
        run_listings([Listing(*listing) for listing in listings], clone, commands)
    )
    if problem is None:
        assert not problems
    else:
        assert problem.split(".*")[0] in problems
        assert problem.split(".*")[-1] in problems
