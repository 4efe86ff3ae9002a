import errno
import io
from collections.abc import Mapping

import click
import pytest
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn
from typer.testing import CliRunner

from knnper.cli.errors import ErrorReportingGroup, system_error
from knnper.cli.terminal import print_table
from knnper.server.observer import TerminalObserver


def record(server_round: int, **more: float) -> Mapping[str, float | int]:
    figures = {"train_loss": 0.5, "num_clients": 8, "num_failed": 0, "seconds": 1.25}
    return {"server_round": server_round, **figures, **more}


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
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_system_error_is_a_message(error: OSError, message: str) -> None:
    assert message in system_error(error)
    done = CliRunner().invoke(failing_with(error), ["fail"])
    assert done.exit_code == 1
    assert f"Error: {system_error(error)}" in done.stderr
    assert "Traceback" not in done.output


def test_broken_pipe_prints_nothing() -> None:
    pipe = BrokenPipeError(errno.EPIPE, "Broken pipe")
    done = CliRunner().invoke(failing_with(pipe), ["fail"])
    assert done.exit_code == 1
    assert done.output == ""


def test_a_bug_keeps_its_traceback() -> None:
    done = CliRunner().invoke(failing_with(KeyError("x")), ["fail"])
    assert isinstance(done.exception, KeyError)


def test_a_wide_table_keeps_its_names_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    header = ("method", *(f"figure {number}" for number in range(8)))
    names = ["kNN-Per (class prior)", "FedAvg + FT"]
    print_table(header, [[name, *(8 * ["81.7 ± 22.7 %"])] for name in names])
    written = click.unstyle(capsys.readouterr().out)
    assert all(len(line) <= 80 for line in written.splitlines())
    assert all(name in written for name in names)
    # One that fits has its lines.
    print_table(header[:3], [["FedAvg", "1", "2"]])
    assert "│ FedAvg │" in capsys.readouterr().out
