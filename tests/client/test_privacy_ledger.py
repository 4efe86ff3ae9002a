"""The ledger of a site's privacy: what it holds, what it notices, and its budgets."""

import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dp_accounting
import pytest

from knnper.audit_log import NO_HASH
from knnper.client import privacy_ledger
from knnper.client.privacy_budget import PrivacyBudget, site_release
from knnper.client.privacy_ledger import (
    HEAD,
    LEDGER,
    ProtectedUpdate,
    read_updates,
    record_update,
    spending_lock,
)
from knnper.client.settings import SitePrivacySettings
from knnper.errors import RunError
from knnper.files import write_atomically
from knnper.privacy import Release, epsilon_of
from knnper.reasons import Code

DELTA = 1e-5
NOW = datetime.now(UTC)
UPDATE = ProtectedUpdate(NOW, "e" * 64, 1, noise_multiplier=8.0)
MONTHS = timedelta(days=30)


def record(state: Path, *updates: ProtectedUpdate) -> None:
    with spending_lock(state):
        for update in updates:
            record_update(state, update)


def three_updates(state: Path) -> list[ProtectedUpdate]:
    updates = [replace(UPDATE, server_round=number) for number in (1, 2, 3)]
    record(state, *updates)
    return updates


def lines_of(state: Path) -> list[str]:
    return (state / LEDGER).read_text().splitlines()


def budget(state: Path, **changes: Any) -> PrivacyBudget:
    """Return the budget of an experiment with S = 1 and σ = 8."""
    settings = SitePrivacySettings(clip_norm=1.0, noise_multiplier=8.0, **changes)
    return PrivacyBudget(settings, state, UPDATE.experiment)


def epsilon_of_rounds(count: int, noise_multiplier: float = 8.0) -> float:
    """Return ε by the package: Gaussian releases add their precisions."""
    sigma = noise_multiplier / 2 / math.sqrt(count)
    return float(dp_accounting.get_epsilon_gaussian(sigma, DELTA))


def test_read_returns_what_was_appended(tmp_path: Path) -> None:
    assert read_updates(tmp_path / "new") == []
    assert not (tmp_path / "new").exists()
    updates = three_updates(tmp_path)
    assert read_updates(tmp_path) == updates


def test_two_data_sets_differ_by_twice_the_clip_norm() -> None:
    assert site_release(3.0) == Release(1.5)
    assert site_release(8.0, 2) == Release(4.0, count=2)


def enough_for(count: int) -> float:
    """Return a budget that ``count`` updates just fit into."""
    return epsilon_of_rounds(count) + 1e-6


def edited(text: str) -> str:
    return text.replace('"server_round": 2', '"server_round": 9')


def with_less_noise_in_all(text: str) -> str:
    """Change the lines and recompute no digest."""
    return text.replace('"noise_multiplier": 8.0', '"noise_multiplier": 80.0')


DAMAGES: dict[str, Callable[[str], str]] = {
    "edited": edited,
    "less noise": with_less_noise_in_all,
    "first line removed": lambda text: "".join(text.splitlines(keepends=True)[1:]),
    "last line removed": lambda text: "".join(text.splitlines(keepends=True)[:-1]),
    "lines swapped": lambda text: "".join(reversed(text.splitlines(keepends=True))),
    "last line torn": lambda text: text[:-20],
    "no JSON": lambda text: "x" + text,
    "emptied": lambda text: "",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_ledger_is_noticed(tmp_path: Path, damage: str) -> None:
    three_updates(tmp_path)
    path = tmp_path / LEDGER
    path.write_text(DAMAGES[damage](path.read_text()))
    with pytest.raises(RunError, match=r"cannot be trusted.*remove both") as raised:
        read_updates(tmp_path)
    assert [reason.code for reason in raised.value.reasons] == [Code.UNUSABLE_STATE]
    with pytest.raises(RunError, match="cannot be trusted"):
        budget(tmp_path).spend(4)


@pytest.mark.parametrize("name", [LEDGER, HEAD])
def test_missing_file_is_noticed(tmp_path: Path, name: str) -> None:
    three_updates(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(RunError, match="cannot be trusted"):
        read_updates(tmp_path)
    (tmp_path / (HEAD if name == LEDGER else LEDGER)).unlink()
    assert read_updates(tmp_path) == []


@pytest.mark.parametrize("num_before", [0, 2])
def test_kills_between_line_and_head_keep_the_lines(
    tmp_path: Path, num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, *[UPDATE] * num_before)

    def killed(path: Path, content: str) -> None:
        if content != NO_HASH:
            raise KeyboardInterrupt
        write_atomically(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(privacy_ledger, "write_atomically", killed)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                record(tmp_path, UPDATE)
    assert len(read_updates(tmp_path)) == num_before + 2
    # The next line brings the head up to date.
    record(tmp_path, UPDATE)
    assert len(read_updates(tmp_path)) == num_before + 3
    last = json.loads(lines_of(tmp_path)[-1])
    assert (tmp_path / HEAD).read_text() == last["hash"]


def test_kill_within_a_line_loses_that_line_alone(tmp_path: Path) -> None:
    three_updates(tmp_path)
    path = tmp_path / LEDGER
    path.write_text(path.read_text() + '{"time": "2026-')
    assert len(read_updates(tmp_path)) == 3
    record(tmp_path, UPDATE)
    assert len(read_updates(tmp_path)) == 4


def test_line_is_on_disk_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    record(tmp_path, UPDATE)
    synced.clear()
    record(tmp_path, UPDATE)
    inodes = [(tmp_path / name).stat().st_ino for name in (LEDGER, HEAD, ".")]
    assert synced == inodes


def test_writers_that_share_a_ledger_do_not_exceed_the_budget(tmp_path: Path) -> None:
    # Each thread opens the lock for itself, as a process does.
    most = enough_for(5)

    def spend(server_round: int) -> bool:
        return not budget(tmp_path, epsilon_run=most).spend(server_round)

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(spend, range(20))) == 5
    assert len(read_updates(tmp_path)) == 5


@pytest.mark.parametrize("rounds", [1, 3, 50])
def test_budget_allows_the_rounds_that_it_pays_for(tmp_path: Path, rounds: int) -> None:
    exact = budget(tmp_path, epsilon_run=enough_for(rounds))
    assert exact.objections(rounds) == []
    (reason,) = exact.objections(rounds + 1)
    assert reason.fields["found"] == pytest.approx(epsilon_of_rounds(rounds + 1))
    assert f"with this many more updates: {rounds + 1};" in str(reason)
    assert "the epsilon of the run would be" in str(reason)


def test_spending_stops_at_the_budget_of_the_run(tmp_path: Path) -> None:
    limited = budget(tmp_path, epsilon_run=enough_for(3))
    assert [bool(limited.spend(number)) for number in range(1, 6)] == [
        *[False] * 3,
        True,
        True,
    ]
    other = replace(limited, experiment="f" * 64)
    assert other.spend(1) == [], "another experiment has a budget of its own"
    assert [str(reason) for reason in limited.spend(4)] == [
        f"the epsilon of the run would be {epsilon_of_rounds(4):.4g} with this many "
        f"more updates: 1; expected {epsilon_of_rounds(3):.4g} or less at delta 1e-05 "
        "(limits.privacy)"
    ]


def test_year_counts_all_experiments_and_forgets_after_365_days(tmp_path: Path) -> None:
    aged = [
        replace(UPDATE, time=NOW - timedelta(days=days), experiment="f" * 64)
        for days in (800, 366, 364, 2)
    ]
    record(tmp_path, *aged)
    limited = budget(tmp_path, epsilon_year=enough_for(3), epsilon_run=100.0)
    assert limited.spending()["year"]["epsilon"] == pytest.approx(epsilon_of_rounds(2))
    assert limited.spending()["run"]["epsilon"] == 0
    assert limited.spend(1) == []
    (reason,) = limited.spend(2)
    assert "the epsilon of the year" in str(reason)


def test_updates_of_different_noise_are_composed(tmp_path: Path) -> None:
    record(tmp_path, UPDATE, replace(UPDATE, noise_multiplier=4.0))
    limited = budget(tmp_path, epsilon_run=100.0)
    expected = epsilon_of([Release(4.0), Release(2.0)], DELTA)
    assert limited.spending()["run"]["epsilon"] == pytest.approx(expected)
    assert expected == pytest.approx(
        dp_accounting.get_epsilon_gaussian((1 / 16 + 1 / 4) ** -0.5, DELTA)
    )


def test_an_update_without_noise_exceeds_every_later_budget(tmp_path: Path) -> None:
    record(tmp_path, replace(UPDATE, noise_multiplier=0.0))
    limited = budget(tmp_path, epsilon_run=100.0)
    assert limited.spending()["run"]["epsilon"] == math.inf
    assert limited.spend(2)


def test_ledger_names_experiment_round_and_noise(tmp_path: Path) -> None:
    budget(tmp_path).spend(4)
    (text,) = lines_of(tmp_path)
    line = json.loads(text)
    for name in ("number", "time", "event", "previous", "hash"):
        line.pop(name)
    assert line == {
        "experiment": "e" * 64,
        "server_round": 4,
        "noise_multiplier": 8.0,
    }
