"""The script behind ``make release``."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATED = "# Changelog\n\n## [1.2.3] - 2026-01-31\n"


def run_release(folder: Path, changelog: str) -> subprocess.CompletedProcess[str]:
    """Run the script on version 1.2.3; a stand-in for Python notes its arguments."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/release", folder / ".ci/release")
    (folder / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "$@" > arguments.txt\n')
    python.chmod(0o755)
    return subprocess.run(
        [folder / ".ci/release"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_release_builds_a_dated_version_and_prints_the_tag(tmp_path: Path) -> None:
    done = run_release(tmp_path, DATED)
    assert done.returncode == 0
    assert (tmp_path / "arguments.txt").read_text() == "-m build --outdir dist .\n"
    assert "git tag --annotate v1.2.3" in done.stdout


@pytest.mark.parametrize(
    "changelog",
    [
        "# Changelog\n\n## [Unreleased]\n",
        DATED.replace("1.2.3", "1.2.4"),
        DATED.replace("1.2.3", "1x2y3"),
        DATED.replace(" - 2026-01-31", ""),
    ],
)
def test_release_refuses_a_version_without_a_dated_section(
    tmp_path: Path, changelog: str
) -> None:
    done = run_release(tmp_path, changelog)
    assert done.returncode == 1
    assert "## [1.2.3] - YYYY-MM-DD" in done.stderr
    assert not (tmp_path / "arguments.txt").exists()
