"""Runs with differential privacy, with the real server and real clients."""

import json
from pathlib import Path

import pytest

from tests.apps.site_grid import experiment
from tests.apps.test_site_run import lead, three, weights_of

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("inside_a_run")]


@pytest.mark.parametrize("noise_at", ["server", "clients"])
def test_noise_of_real_runs_does_not_follow_from_the_seed(
    tmp_path: Path, files: dict[str, Path], noise_at: str
) -> None:
    section = "{clip_norm: 0.5, noise_multiplier: 0.5}"
    if noise_at == "clients":
        section = "{clip_norm: 0.5, noise_multiplier: 0.5, noise_shares: 3}"
    settings = experiment(privacy=section, **{"training.num_rounds": "2"})
    runs = [lead(three(files), settings, tmp_path / name) for name in ("a", "b")]
    assert len({weights_of(run) for run in runs}) == 2
    for run in runs:
        assert [record["num_releases"] for record in run.rounds()] == [1, 2]
        releases = (run.checkpoints / "releases.jsonl").read_text().splitlines()
        assert [json.loads(line)["server_round"] for line in releases] == [1, 2]
        results = run.results()
        assert results["training"]["epsilon"] == run.rounds()[-1]["epsilon"]
        assert results["manifest"]["privacy"]["sampling_probability"] == 1
