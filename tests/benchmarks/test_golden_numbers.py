"""What `make golden` calls a difference, and what a note."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import golden

pytestmark = pytest.mark.integration

RUN = {
    "state": "aa",
    "clients.csv": {"accuracy": "11", "num_train": "22"},
    "figures": {"seen.accuracy_mean": 0.5},
}


def compared(
    capsys: pytest.CaptureFixture[str], now: dict[str, Any]
) -> tuple[int, list[str]]:
    old = {"machine": {}, "runs": {"serial fedavg": RUN}}
    count = golden.compare(old, {"machine": {}, "runs": now})
    return count, capsys.readouterr().out.splitlines()[:-1]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"state": "bb"}, "state"),
        ({"clients.csv": {"accuracy": "11", "num_train": "33"}}, "num_train"),
        ({"clients.csv": {"accuracy": "11"}}, "num_train"),
        ({"figures": {"seen.accuracy_mean": 0.6}}, "0.6"),
    ],
)
def test_a_value_that_changed_is_a_difference(
    capsys: pytest.CaptureFixture[str], changed: dict[str, Any], word: str
) -> None:
    count, (line,) = compared(capsys, {"serial fedavg": {**RUN, **changed}})
    assert count == 1
    assert line.startswith("serial fedavg: ")
    assert word in line


def test_another_name_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"accuracy": "11", "num_examples": "22", "more": "44"}
    run = {**RUN, "clients.csv": columns}
    count, lines = compared(capsys, {"serial fedavg": run})
    assert count == 0
    assert any("num_train" in line and "num_examples" in line for line in lines)
    count, (line,) = compared(capsys, {"serial mean": RUN})
    assert count == 0
    assert "serial mean" in line


def test_a_method_that_is_gone_or_fails_is_a_difference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compared(capsys, {})[0] == 1
    failed = {"failed": 1, "said": ["Error: no such thing"]}
    count, lines = compared(capsys, {"serial fedavg": failed})
    assert count > 0
    assert any("no such thing" in line for line in lines)


def test_a_run_that_fails_is_kept_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    unknown = {**golden.CHOSEN["experiment"], "method": {"name": "fedavgg"}}
    found = golden.one_run("fedavgg", "serial", unknown)
    assert found["failed"] == 2
    assert any("fedavgg" in line for line in found["said"])
