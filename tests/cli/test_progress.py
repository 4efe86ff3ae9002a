import io
from collections.abc import Mapping

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from knnper_cli.simulate import bars
from knnper_cli.terminal import TerminalObserver, progress_observer, round_figures


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
