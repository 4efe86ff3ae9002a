import errno
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from rich.console import Console
from rich.progress import Progress, TextColumn
from typer.testing import CliRunner

import knnper.simulation.workbench
from knnper_cli.app import app
from knnper_cli.simulate import bars
from knnper_cli.terminal import (
    ErrorReportingGroup,
    TerminalObserver,
    progress_observer,
    round_figures,
    system_error,
)
from tests.simulation.batches.small_sweep import document


def record(server_round: int, **more: float) -> Mapping[str, float | int]:
    figures = {"train_loss": 0.5, "num_clients": 8, "num_failed": 0, "seconds": 1.25}
    return {"server_round": server_round, **figures, **more}


def test_figures_of_a_round() -> None:
    assert round_figures(record(1)) == "train loss 0.500, 8 clients, 1.2 s"
    validated = record(1, validation_accuracy=0.712, num_failed=2)
    assert round_figures(validated) == (
        "train loss 0.500, validation 71.2 %, 8 clients, 2 failed, 1.2 s"
    )


def test_lines_are_rare_and_include_the_first_and_the_last_round() -> None:
    lines: list[str] = []
    now = 0.0
    observer = TerminalObserver(None, lines.append, lambda: now)
    observer.training_started(10, 4)
    for server_round in range(4, 11):
        observer.round_finished(record(server_round))
        now += 2.0
    observer.personalization_started(3)
    for _ in range(3):
        observer.client_personalized()
        now += 4.0
    observer.finished()
    assert [line.partition(",")[0] for line in lines] == [
        "training: rounds 4 to 10",
        "round 4/10: train loss 0.500",
        "round 7/10: train loss 0.500",
        "round 10/10: train loss 0.500",
        "personalising 3 clients",
        "personalised 2/3 clients",
        "personalised 3/3 clients",
    ]


def test_bars_of_a_resumed_run() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    columns = (
        TextColumn("{task.description} {task.completed} {task.fields[figures]}"),
    )
    with Progress(*columns, console=console) as progress:
        observer = TerminalObserver(progress)
        observer.training_started(10, 4)
        assert progress.tasks[0].completed == 3
        observer.round_finished(record(4))
        observer.personalization_started(2)
        observer.client_personalized()
        observer.finished()
    assert [task.completed for task in progress.tasks] == [4, 1]
    assert progress.tasks[0].fields["figures"].startswith("train loss 0.500")


def test_without_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_observer() as observer:
        observer.training_started(2, 1)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "training: rounds 1 to 2\n")


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([0, 8, 4, 1], " █▄▁"), ([0, 0], "  "), ([1000, 1], "█▁"), ([3], "█")],
)
def test_bars(counts: list[int], expected: str) -> None:
    assert bars(counts) == expected


FULL = OSError(errno.ENOSPC, "No space left on device")


def failing_with(error: Exception) -> typer.Typer:
    """Return a command line whose one command fails."""
    group = typer.Typer(cls=ErrorReportingGroup, pretty_exceptions_enable=False)

    @group.command("fail")
    def fail() -> None:
        raise error

    @group.command("other")
    def other() -> None:
        """Make the first command one of several."""

    return group


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FULL, "No space left on device; free space, then give the same command again"),
        (
            FileExistsError(errno.EEXIST, "File exists", "a/file"),
            "a/file: File exists; expected a folder there; choose another path",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "closed/x"),
            "closed/x: Permission denied; expected to be allowed; change its",
        ),
        (OSError("cannot identify the image"), "cannot identify the image"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "refused"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_system_error_is_a_message(error: OSError, message: str) -> None:
    assert message in system_error(error)
    done = CliRunner().invoke(failing_with(error), ["fail"])
    assert done.exit_code == 1
    assert f"Error: {system_error(error)}" in done.stderr
    assert "Traceback" not in done.output


def test_nobody_is_told_that_nobody_reads() -> None:
    pipe = BrokenPipeError(errno.EPIPE, "Broken pipe")
    done = CliRunner().invoke(failing_with(pipe), ["fail"])
    assert done.exit_code == 1
    assert done.output == ""


def test_a_bug_keeps_its_traceback() -> None:
    done = CliRunner().invoke(failing_with(KeyError("x")), ["fail"])
    assert isinstance(done.exception, KeyError)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with an experiment, a sweep, and a file in the way."""
    monkeypatch.chdir(tmp_path)
    base = {**document()["base"], "run": {"engine": "serial"}}
    Path("one.yaml").write_text(yaml.safe_dump({"name": "one", **base}))
    Path("sweep.yaml").write_text(yaml.safe_dump(document()))
    Path("afile").write_text("in the way\n")
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


@pytest.mark.usefixtures("files")
def test_a_folder_inside_a_file_is_refused() -> None:
    done = run("simulate", "one.yaml", "--output", "afile/x")
    assert done.exit_code == 1
    assert "afile/x: Not a directory; expected a folder there" in done.stderr


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("command", ["sweep", "compare"])
def test_a_file_is_no_folder_for_runs(command: str, tmp_path: Path) -> None:
    if command == "compare":
        rows = {"mean": {"method": {"name": "fedavg"}}}
        base = {key: one for key, one in document()["base"].items() if key != "method"}
        comparison = {"name": "c", "reference": "mean", "base": base, "rows": rows}
        Path("compare.yaml").write_text(yaml.safe_dump(comparison))
    done = run(command, f"{command}.yaml", "--output", "afile", "--workers", "1")
    assert done.exit_code == 2
    assert "afile is a file, expected a folder for the runs; choose" in done.stderr
    assert Path("afile").read_text() == "in the way\n"


@pytest.mark.usefixtures("files")
def test_a_full_disk_ends_a_run_that_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise FULL

    monkeypatch.setattr(knnper.simulation.workbench, "simulate", full)
    done = run("simulate", "one.yaml", "--output", "out")
    assert done.exit_code == 1
    assert "Error: No space left on device; free space" in done.stderr
    assert "To begin again: knnper simulate --resume out" in done.stderr
