"""Findings of the doctor on the terminal, or as JSON."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from knnper.cli.errors import RUN_FAILED
from knnper.cli.formats import counted
from knnper.cli.terminal import print_json, tell

# httpx is imported inside the functions, to keep `knnper --help` fast.
if TYPE_CHECKING:
    from knnper.transport.diagnosis import Check, Examined

_MARKS = {"ok": "✓", "skipped": "-", "warning": "!", "problem": "✗"}
_INDENT = " " * 19
_REACH = ("server", "tls", "gateway")
_ADMISSION = ("clock", "version", "certificate", "key", "registration")

Summarize = Callable[["Sequence[Examined]"], str]
"""Sums up at least one problem in a sentence."""


def diagnose(
    kind: str,
    name: str,
    file: Path,
    checks: "Iterable[Check]",
    summarize: Summarize,
    *,
    as_json: bool,
) -> None:
    """Run the checks of a client or a server and print the findings.

    Raises
    ------
    typer.Exit
        With code 1, if a check failed.
    """
    from knnper.transport.diagnosis import examine, is_well

    examined = examine(checks)
    problems = _with_verdict(examined, "problem")
    summary = summarize(problems) if problems else "Nothing is wrong"
    if as_json:
        print_json(
            {
                "kind": kind,
                "name": name,
                "file": str(file),
                "well": is_well(examined),
                "verdict": summary,
                "checks": [check.as_document() for check in examined],
            }
        )
    else:
        tell(f"{kind} {name} ({file})")
        _print(examined, summary)
    if problems:
        raise typer.Exit(RUN_FAILED)


def _with_verdict(examined: "Sequence[Examined]", verdict: str) -> "list[Examined]":
    return [check for check in examined if check.finding.verdict == verdict]


def _print(examined: "Sequence[Examined]", summary: str) -> None:
    for verdict, mark in _MARKS.items():
        for check in _with_verdict(examined, verdict):
            tell(f"  {mark} {check.subject:<14} {check.finding.found}")
            if check.finding.expected:
                tell(f"{_INDENT}expected: {check.finding.expected}")
            if check.finding.fix:
                tell(f"{_INDENT}fix: {check.finding.fix}")
    problems = _with_verdict(examined, "problem")
    warnings = _with_verdict(examined, "warning")
    counts = [counted(len(warnings), "warning")] if warnings else []
    if problems:
        subjects = ", ".join(check.subject for check in problems)
        counts.append(f"{counted(len(problems), 'problem')}: {subjects}")
    if not counts:
        tell(f"{summary}.")
    else:
        tell(f"{summary}{'. ' if problems else ', with '}{', '.join(counts)}.")


def client_verdict(problems: "Sequence[Examined]") -> str:
    """Sum up a client's problems in a sentence."""
    found_by_subject = {check.subject: check.finding.found for check in problems}
    for subjects, verdict in (
        (_REACH, "The server cannot be reached"),
        (_ADMISSION, "The server is there, and this client cannot join it"),
    ):
        for subject in subjects:
            if subject in found_by_subject:
                return f"{verdict}: {found_by_subject[subject]}"
    return "The server can be reached, and this client has faults of its own"


def server_verdict(problems: "Sequence[Examined]") -> str:
    """Sum up a server's problems in a sentence."""
    if any(check.subject == "server" for check in problems):
        return "The server is down: no client can connect, and no run can begin"
    return "The server runs, with faults"
