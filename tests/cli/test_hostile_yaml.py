"""Files with aliases that stand for 10^10 values: every command names the line."""

import resource
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knnper.cli.app import app
from tests.processes import KNNPER

LINES = ["&0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"]
LINES += [f"&{n} [{', '.join(10 * [f'*{n - 1}'])}]" for n in range(1, 10)]
BOMB = "".join(f"a{number}: {line}\n" for number, line in enumerate(LINES))
COMMANDS = (
    *("simulate FILE", "sweep FILE", "compare FILE", "partition FILE"),
    *("fed server FILE", "fed client FILE", "fed submit FILE GOOD"),
    *("site check FILE", "site check GOOD --task FILE", "site serve FILE"),
    *("site onboard FILE", "site doctor FILE", "site token list FILE"),
)


@pytest.fixture
def bomb(tmp_path: Path) -> Path:
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMB)
    return path


def typed(command: str, bomb: Path) -> list[str]:
    good = bomb.with_name("client.yaml")
    good.write_text(
        "name: a\nserver: localhost:1\ninsecure: true\n"
        "data: {name: image_folder, path: data}\n"
    )
    return [
        {"FILE": str(bomb), "GOOD": str(good)}.get(word, word)
        for word in command.split()
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_refuses_a_file_whose_aliases_explode(command: str, bomb: Path) -> None:
    # Small enough to be spelled out in a second, where that is not refused.
    bomb.write_text("".join(BOMB.splitlines(keepends=True)[:7]))
    result = CliRunner().invoke(app, typed(command, bomb))
    words = " ".join(result.output.split())
    assert "aliases expand this value to more than" in words, result.output
    assert "line 6" in words


def limited() -> None:
    """Let the process have a minute of one processor and 8 GB, at most."""
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[:7:2])
def test_command_ends_with_one_error(command: str, bomb: Path) -> None:
    ended = subprocess.run(
        [str(KNNPER), *typed(command, bomb)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limited,
    )
    assert ended.returncode == 2, ended.stderr[-1000:]
    assert "aliases expand this value" in ended.stderr
    assert "Traceback" not in ended.stderr
