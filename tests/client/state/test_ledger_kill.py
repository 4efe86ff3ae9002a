"""Kills of processes that spend a site's privacy: no update leaves uncounted."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.state.killed_ledgers import KILLS, MOST_UPDATES


@pytest.mark.slow
def test_ledger_survives_200_kills(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.client.state.killed_ledgers"]
    done = subprocess.run(
        [*program, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        check=True,
        timeout=300,
    )
    records: list[dict[str, int]] = json.loads(done.stdout)
    assert sum(record["num_killed"] for record in records) >= KILLS
    num_in_midst = 0
    for _, group in itertools.groupby(records, key=lambda record: record["budget"]):
        num_sent = num_killed = 0
        for record in group:
            num_sent += record["num_sent"]
            num_killed += record["num_killed"]
            # A kill wastes at most the update that was about to be sent.
            assert num_sent <= record["num_recorded"] <= num_sent + num_killed
            assert record["num_recorded"] <= MOST_UPDATES
            num_in_midst += record["num_sent"] > 0
    assert num_in_midst > KILLS / 10, "kills came while updates were being sent"
