"""What commands print where standard output knows few characters, or only ASCII."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knnper.cli.app import app
from knnper.cli.plain_text import in_encoding_of
from knnper.yaml_text import dump_yaml
from tests.simulation.reporting.made_runs import made_run

EXPERIMENT = {
    "name": "few",
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "num_clients": 3, "alpha": 0.3},
    "model": {"name": "tiny_cnn"},
    "method": {"name": "knn_per"},
}
COMMANDS = {
    "partition": ["partition", "few.yaml"],
    "partition --json": ["partition", "few.yaml", "--json"],
    "list": ["list", "methods"],
    "list --json": ["list", "methods", "--json"],
    "report": ["report", "runs"],
    "report --json": ["report", "runs", "--json"],
    "simulate": ["simulate", "--resume", "runs/Ärztin λ 東京"],
    "help": ["--help"],
    "wrong usage": ["partition", "few.yaml", "--plot", "Ärztin λ 東京"],
    "error": ["partition", "Ärztin λ 東京.yaml"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encodings")
    (folder / "few.yaml").write_text(dump_yaml(EXPERIMENT))
    made_run(folder / "runs" / "Ärztin λ 東京")
    # Two seeds, whose intervals have ±.
    made_run(folder / "runs" / "second", seed=1)
    return folder


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_output_is_written_in_any_encoding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(folder)
    if command[0] == "simulate":  # the run is there: it is shown
        (folder / command[2] / "experiment.yaml").write_text(dump_yaml(EXPERIMENT))
    whole = CliRunner().invoke(app, command)
    for encoding in ("ascii", "latin-1", "cp437"):
        made = CliRunner(charset=encoding).invoke(app, command)
        assert made.exit_code == whole.exit_code
        assert made.exception is None or isinstance(made.exception, SystemExit)
        assert (made.stdout_bytes + made.stderr_bytes).decode(encoding)
        if "--json" in command:  # the same, with escapes
            found = json.loads(made.stdout_bytes.decode(encoding))
            assert found == json.loads(whole.stdout)


def test_bars_and_greek_letters_have_plain_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    command = ["partition", "few.yaml"]
    whole, plain = (
        CliRunner(charset=encoding).invoke(app, command).stdout_bytes.decode(encoding)
        for encoding in ("utf-8", "ascii")
    )
    table = str.maketrans("▁▂▃▄▅▆▇█", "12345678")
    bars = [line.split("│")[6].strip() for line in whole.splitlines() if "│" in line]
    assert len(bars) == 3
    assert all(bar.translate(table) in plain for bar in bars)
    made = CliRunner(charset="ascii").invoke(app, ["report", "runs"])
    assert "+-" in made.stdout_bytes.decode("ascii")


@pytest.mark.slow
def test_markdown_is_written_in_ascii(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    command = ["report", "runs", "--markdown"]
    made = CliRunner(charset="ascii").invoke(app, command)
    assert made.exit_code == 0
    assert "+-" in made.stdout_bytes.decode("ascii")


class Stream:
    """Stands in for standard output."""

    def __init__(self, encoding: str | None) -> None:
        self.encoding = encoding


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", r"lambda Sigma alpha +- 5^2 \xe9 \u6771 \udcff"),
        ("latin-1", "lambda Sigma alpha ± 5² é \\u6771 \\udcff"),
        # What stands for a byte of a file's name that is no UTF-8.
        ("utf-8", "λ Σ ά ± 5² é 東 \\udcff"),
        (None, "λ Σ ά ± 5² é 東 \\udcff"),
    ],
)
def test_characters_outside_the_encoding_are_replaced(
    encoding: str | None, expected: str
) -> None:
    text = "λ Σ ά ± 5² é 東 \udcff"
    assert in_encoding_of(Stream(encoding), text) == expected  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
)
def test_a_process_writes_to_a_file_in_a_c_locale(
    folder: Path, setting: dict[str, str]
) -> None:
    program = Path(sys.executable).with_name("knnper")
    with (folder / "out").open("wb") as file:
        subprocess.run(
            [program, "partition", "few.yaml"],
            cwd=folder,
            env={**os.environ, **setting},
            stdout=file,
            check=True,
        )
    assert "Traceback" not in (folder / "out").read_text(encoding="ascii")
    html = folder / "report.html"
    subprocess.run(
        [program, "report", "runs", "--html", html],
        cwd=folder,
        env={**os.environ, **setting},
        capture_output=True,
        check=True,
    )
    assert "±" in html.read_text(encoding="utf-8")
