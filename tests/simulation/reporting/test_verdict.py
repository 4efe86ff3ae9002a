"""The sentences that a report begins with, and the clients it names."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.simulation.reports.accuracy_table import table_of
from knnper.simulation.reports.estimate import WEAK_NOTE, estimate
from knnper.simulation.reports.finished_run import (
    FinishedRun,
    find_runs,
)
from knnper.simulation.reports.pages import as_html, as_markdown_report
from knnper.simulation.reports.report import report_of
from knnper.simulation.reports.setups import setups_of
from knnper.simulation.reports.verdict import verdict_of, worst_table
from tests.simulation.reporting.made_runs import made_run
from tests.simulation.reporting.parsed_page import Page
from tests.simulation.reporting.test_runs import group, run

CSV = "client,seen,num_test,accuracy,accuracy_global\n"


def verdict(*runs: FinishedRun) -> list[str]:
    setups = setups_of(runs)
    return verdict_of(setups, table_of(setups))


def with_clients(made: FinishedRun, folder: Path, lines: Sequence[str]) -> FinishedRun:
    """Return the run in a folder with these lines of ``clients.csv``."""
    folder.mkdir()
    (folder / "clients.csv").write_text(CSV + "\n".join(lines) + "\n")
    return FinishedRun(folder, made.results)


def test_one_run_is_compared_with_its_global_model() -> None:
    (first, caution) = verdict(run("knn_per", 0.76, 0.62))
    # 0.25 of four clients.
    assert first == (
        "kNN-Per is right for 76.0 % of the seen clients' test examples, 14.0 points "
        "more than FedAvg; 1 of 4 clients is worse off."
    )
    assert caution.startswith("This is one seed")


@pytest.mark.parametrize(
    ("method", "own", "reference", "expected"),
    [
        ("knn_per", 0.5, 0.6, "examples, 10.0 points less than FedAvg; 1 of 4"),
        ("knn_per", 0.6, 0.6, "examples, as often as FedAvg"),
        ("fedavg", 0.6, 0.6, "FedAvg is right for 60.0 % of the seen clients' test"),
        # Its global model means nothing.
        ("local", 0.6, 0.1, "Local is right for 60.0 % of the seen clients' test"),
    ],
)
def test_gain_is_told_where_there_is_a_model_to_compare_with(
    method: str, own: float, reference: float, expected: str
) -> None:
    (first, _) = verdict(run(method, own, reference))
    assert expected in first
    if method != "knn_per":
        assert first.endswith("test examples.")


def test_group_of_one_client_is_singular() -> None:
    finished = run("knn_per", 0.8, 0.6)
    results = {**finished.results, "unseen": group(0.7, 0.5, num_clients=1)}
    unseen = verdict(FinishedRun(Path("demo"), results))[1]
    assert unseen.endswith("; none of 1 client is worse off.")


def test_clients_without_errors_are_not_named_lowest(tmp_path: Path) -> None:
    lines = ["right,true,8,1.0,1.0", "ward,true,4,0.75,0.5"]
    finished = with_clients(run("knn_per", 0.9, 0.8), tmp_path / "a", lines)
    assert verdict(finished)[-1].startswith("Lowest accuracy: ward (75.0 %")
    assert "right" not in verdict(finished)[-1]
    finished = with_clients(run("knn_per", 0.9, 0.8), tmp_path / "b", lines[:1])
    assert not any(line.startswith("Lowest") for line in verdict(finished))


def test_unseen_clients_have_a_sentence() -> None:
    finished = run("knn_per", 0.8, 0.6)
    results = {**finished.results, "unseen": group(0.7, 0.5, num_clients=8)}
    sentences = verdict(FinishedRun(Path("demo"), results))
    assert sentences[1] == (
        "Unseen clients: 70.0 %, 20.0 points more than FedAvg; 2 of 8 clients are "
        "worse off."
    )


def test_second_setup_is_compared_seed_by_seed() -> None:
    runs = [
        run(method, accuracy, 0.5, f"{method}-{seed}", seed)
        for method, expected in (
            ("knn_per", (0.8, 0.7, 0.9)),
            ("fedavg_plus", (0.7, 0.6, 0.8)),
        )
        for seed, accuracy in enumerate(expected)
    ]
    first, second = verdict(*runs)
    # The differences to 0.5 are 0.3, 0.2 and 0.4: t = 4.303, s = 0.1.
    assert "30.0 ± 24.8 points more than FedAvg; 3 of 12 clients in 3 seeds" in first
    assert second == "FedAvg+ is second, 10.0 ± 0.0 points behind."
    # With other differences they cannot be told apart, nor without a common seed.
    unclear = [*runs[:3], run("fedavg_plus", 0.9, 0.5, "x", 0), *runs[4:]]
    assert verdict(*unclear)[-1].endswith("3 seeds cannot distinguish the two.")
    others = [run("fedavg_plus", 0.6, 0.5, "y", seed) for seed in (7, 8)]
    assert verdict(*runs[:3], *others)[-1].endswith("no seed is common to both.")


def test_few_seeds_are_marked() -> None:
    runs = [
        run("knn_per", accuracy, 0.5, str(seed), seed)
        for seed, accuracy in ((0, 0.9), (1, 0.5))
    ]
    _, caution = verdict(*runs)
    assert caution.startswith("Two seeds are too few")
    three = [*runs, run("knn_per", 0.5, 0.6, "2", 2)]
    assert "cannot distinguish this difference from 0" in verdict(*three)[1]
    assert estimate([0.1, 0.2]).percent() == "15.0 ± 63.5 %*"
    assert estimate([0.1, 0.2, None]).text().endswith("*")
    for values in ([0.1], [0.1, 0.2, 0.3]):
        assert "*" not in estimate(values).percent()


def test_clients_that_lose_most_are_named_before_the_lowest(tmp_path: Path) -> None:
    lines = [
        "ward,true,4,0.75,1.0",
        "zoë,true,8,0.25,1.0",
        "new,false,5,0.0,0.0",
        "one,true,1,0.0,0.0",
        "good,true,9,1.0,0.5",
    ]
    finished = with_clients(run("knn_per", 0.7, 0.6), tmp_path / "a", lines)
    assert verdict(finished)[-1] == (
        "Loses most: zoë (25.0 % of 8 examples, global model 100.0 %); ward (75.0 % of "
        "4 examples, global model 100.0 %)."
    )
    (setup,) = setups_of([finished])
    table = worst_table(setup)
    assert table is not None
    assert [(row[0], row[1], row[-2], row[-1]) for row in table.rows] == [
        ("zoë", "seen", "-75.0", "loses most"),
        ("ward", "seen", "-25.0", "loses most"),
        # Of equal ones that with the most examples.
        ("new", "unseen", "0.0", "lowest accuracy"),
        ("one", "seen", "0.0", "lowest accuracy"),
        ("good", "seen", "+50.0", "lowest accuracy"),
    ]
    nobody = with_clients(run("knn_per", 0.7, 0.6), tmp_path / "b", lines[2:4])
    assert verdict(nobody)[-1].startswith("Lowest accuracy: new (0.0 % of 5 examples")
    alone = with_clients(run("local", 0.7, 0.6), tmp_path / "c", lines[:1])
    assert verdict(alone)[-1] == "Lowest accuracy: ward (75.0 % of 4 examples)."


def test_seeds_tell_clients_of_one_name_apart(tmp_path: Path) -> None:
    runs = [
        with_clients(
            run("knn_per", 0.7, 0.6, seed=seed),
            tmp_path / str(seed),
            [f"0003,true,4,{accuracy},1.0"],
        )
        for seed, accuracy in ((4, 0.5), (5, 0.25))
    ]
    assert "Loses most: 0003 of seed 5 (25.0 %" in verdict(*runs)[-1]


def test_a_run_without_any_client_has_a_verdict(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", [], method="fedavg", losses=())
    assert "No client has reported" in as_html(report_of([path]))


@pytest.mark.integration
def test_verdict_comes_first_and_the_legend_after_the_numbers(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    report = report_of(paths)
    (chapter,) = report.chapters
    shown = Page(as_html(report)).text, as_markdown_report(report)
    printed = CliRunner().invoke(app, ["report", *map(str, paths)]).stdout
    assert printed.startswith(chapter.verdict[0])
    for text in shown:
        places = [
            text.rindex(part)
            for part in (
                chapter.verdict[0],
                chapter.over.partition,
                "Seen clients",
                WEAK_NOTE,
                "Accuracies on the clients'",
                "Clients served worst",
            )
        ]
        assert places == sorted(places)


def test_labels_name_setups(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    paths.append(made_run(tmp_path / "other", rate=2))
    runs, _ = find_runs(paths, ["ours", "ours", "theirs"])
    assert [setup.label for setup in setups_of(runs)] == ["ours", "theirs"]
    # Runs that differ in the seed alone stay apart where their reader says so, and
    # those that share a label without being the same are told apart.
    runs, _ = find_runs(paths, ["a", "b", "a"])
    assert [setup.label for setup in setups_of(runs)] == ["a (0)", "b", "a (other)"]
    # A folder's label is that of all its runs.
    runs, _ = find_runs([tmp_path], ["all"])
    assert {run.label for run in runs} == {"all"}


def test_the_command_takes_a_label_for_each_run(tmp_path: Path) -> None:
    paths = [made_run(tmp_path / name, rate=rate) for rate, name in enumerate("ab")]
    command = ["report", *map(str, paths), "--label", "slow"]
    wrong = CliRunner().invoke(app, command)
    assert wrong.exit_code == 2
    assert "found 1 label for 2 RUNs" in " ".join(wrong.stderr.split())
    result = CliRunner().invoke(app, [*command, "--label", "fast", "--json"])
    assert '"label": "fast"' in result.stdout
    assert '"label": "slow"' in result.stdout
