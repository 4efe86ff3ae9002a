"""Each benchmark is a command that explains itself, and a target of the Makefile."""

import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

TEXT = Path("Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
LISTS = re.findall(r"^BENCHMARKS(?:_ALONE)? := (.*)$", TEXT, re.MULTILINE)
NAMES = [name for names in LISTS for name in names.split()]


@pytest.mark.parametrize("name", NAMES)
def test_help_and_the_page_say_what_is_measured(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit) as ended:
        module.parser().parse_args(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert str(module.__doc__).splitlines()[0] in text
    assert "--repetitions" in text
    assert "--images ROOT" in text
    given = module.parser().parse_args([])
    assert given.repetitions >= 1
    assert given.images == ""
    page = Path("benchmarks/README.md").read_text(encoding="utf-8")
    assert f"## {name}" in page
    assert f"make bench-{name}" in page
