"""Text of the other side: it is one short line where it arrives, and steers nothing."""

import json
import logging
import sys

import pytest

from knnper.cli.terminal import print_json, print_table, say, tell
from knnper.errors import MOST_LOGGED, HarmlessFormatter, harmless, printable

CLEAR, OSC, C1, BACKWARDS = "\x1b[2J", "\x1b]0;title\x07", "\x9b2J", "\u202egnp.exe"


@pytest.mark.parametrize("steering", [CLEAR, OSC, C1, BACKWARDS, "\r", "\x00", "\x7f"])
def test_nothing_steers_a_terminal(steering: str) -> None:
    for safe in (printable, harmless):
        told = safe(f"a{steering}b")
        assert told.isprintable()
        assert told != f"a{steering}b"


def test_what_is_foreign_is_one_line_and_what_is_ours_may_have_more() -> None:
    assert printable("a\n2026 INFO b") == "a\\n2026 INFO b"
    assert harmless("a\n\tb é 漢") == "a\n\tb é 漢"


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("x", logging.ERROR, "", 1, message, args, None)


def test_a_record_of_a_log_cannot_pass_for_two() -> None:
    layout = HarmlessFormatter("%(levelname)s %(message)s")
    told = layout.format(record("refused: %s", f"no\nERROR all is lost{CLEAR}"))
    assert told == "ERROR refused: no\n    ERROR all is lost\\u001b[2J"
    try:
        raise ValueError(f"x\nERROR y{CLEAR}")
    except ValueError:
        failed = record("it failed")
        failed.exc_info = sys.exc_info()
        lines = layout.format(failed).splitlines()
    assert [line for line in lines if line.startswith("ERROR")] == ["ERROR it failed"]
    assert "\x1b" not in "".join(lines)
    assert len(layout.format(record("y" * 10**6))) < MOST_LOGGED + 100


def test_whatever_a_command_writes_steers_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for text in (CLEAR, OSC, C1):
        say(f"Error: {text}")
        tell(text)
        print_table([f"[red]{text}"], [[f"[bold]{text}"]])
        print_json({text: text})
    written = capsys.readouterr()
    assert not {"\x1b", "\x07", "\x9b"} & set(written.out + written.err)
    assert "[bold]" in written.out, "it is no markup either"
    print_json({C1: OSC})
    assert json.loads(capsys.readouterr().out) == {C1: OSC}
