import tempfile
from pathlib import Path

import pytest

from knnper.errors import RunError
from knnper.transport.diagnosis import (
    Check,
    Finding,
    Verdict,
    examine,
    fine,
    folder_finding,
    is_well,
    problem,
    skipped,
    standing_in,
    version_finding,
    warning,
)


def unexpected() -> Finding:
    raise AssertionError("it was looked at")


def test_what_makes_no_sense_is_not_looked_at() -> None:
    checks = (
        Check("port", lambda: problem("closed", "open it")),
        Check("tls", unexpected, ("port",)),
        Check("certificate", unexpected, ("tls",)),
        Check("folder", lambda: fine("writable")),
        Check("owner", lambda: fine("own"), ("folder", "not among the checks")),
    )
    port, tls, certificate, *rest = examine(checks)
    assert port.finding.verdict is Verdict.PROBLEM
    assert tls.finding == skipped("applies once this passes: port")
    assert certificate.finding == skipped("applies once this passes: tls")
    assert all(one.finding.verdict is Verdict.OK for one in rest)


def test_a_warning_stops_nothing() -> None:
    first = Check("key", lambda: warning("readable", "chmod"))
    key, owner = examine([first, Check("owner", lambda: fine("own"), ("key",))])
    assert key.finding.verdict is Verdict.WARNING
    assert owner.finding.verdict is Verdict.OK
    assert is_well(examine([first]))
    assert not is_well(examine([Check("a", lambda: problem("b", "c"))]))


@pytest.mark.parametrize(
    "error", [RunError("gone; bring it"), OSError("gone; bring it")]
)
def test_expected_errors_are_problems(error: Exception) -> None:
    def look() -> Finding:
        raise error

    (found,) = examine([Check("store", look)])
    assert found.finding == problem("gone", "bring it")
    assert found.as_document() == {
        "subject": "store",
        "verdict": "problem",
        "found": "gone",
        "expected": "",
        "fix": "bring it",
    }


def test_a_folder_is_neither_made_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = folder_finding(tmp_path / "a" / "b", "state")
    assert finding.verdict is not Verdict.PROBLEM
    assert "yet to be made" in finding.found
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "state").write_text("")
    finding = folder_finding(tmp_path / "state", "state")
    assert finding.verdict is Verdict.PROBLEM
    assert "is a file" in finding.found

    def refuse(**arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    # The superuser, who may run this test, can write everywhere.
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    finding = folder_finding(tmp_path, "state")
    assert finding.found == f"{tmp_path} cannot be written (Permission denied)"
    assert "chown" in finding.fix


@pytest.mark.parametrize(
    ("free_mb", "verdict"),
    [(99, Verdict.PROBLEM), (999, Verdict.WARNING), (1000, Verdict.OK)],
)
def test_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mb: int, verdict: Verdict
) -> None:
    class Usage:
        free = free_mb * 1_000_000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    assert folder_finding(tmp_path, "state").verdict is verdict


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [
        ({}, Verdict.OK),
        ({"knnper": "0.1.0", "flwr": "1.41.0"}, Verdict.OK),
        ({"knnper": "0.1.1", "flwr": "1.41.0"}, Verdict.WARNING),
        ({"knnper": "0.2.0", "flwr": "1.41.0"}, Verdict.PROBLEM),
        ({"knnper": "0.1.0", "flwr": "1.40.9"}, Verdict.PROBLEM),
    ],
)
def test_versions(theirs: dict[str, str], verdict: Verdict) -> None:
    own = {"knnper": "0.1.0", "flwr": "1.41.0"}
    assert version_finding(own, theirs).verdict is verdict


@pytest.mark.parametrize("body", ["", "{}", "[]", '{"standing": 1}'])
def test_no_standing(body: str) -> None:
    assert standing_in(body) is None
