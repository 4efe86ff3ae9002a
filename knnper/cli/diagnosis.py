"""What a doctor has found, on the terminal or as JSON."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from knnper.cli.terminal import RUN_FAILED, counted, print_json, tell

# What loads httpx is imported inside the functions: `knnper --help` need not wait.
if TYPE_CHECKING:
    from knnper.transport.diagnosis import Check, Examined

_MARKS = {"ok": "✓", "skipped": "-", "warning": "!", "problem": "✗"}
_INDENT = " " * 19
Verdict = Callable[["Sequence[Examined]"], str]
"""Sums problems, at least one, up in a sentence."""


def diagnose(
    kind: str,
    name: str,
    file: Path,
    checks: "Iterable[Check]",
    verdict: Verdict,
    *,
    as_json: bool,
) -> None:
    """Examine a client or a server; exit with 1 where something is wrong."""
    from knnper.transport.diagnosis import examine, is_well

    examined = examine(checks)
    wrong = _with_verdict(examined, "problem")
    summary = verdict(wrong) if wrong else "Nothing is wrong"
    if as_json:
        document: dict[str, object] = {"kind": kind, "name": name, "file": str(file)}
        document |= {"well": is_well(examined), "verdict": summary}
        checked = [check.as_document() for check in examined]
        print_json({**document, "checks": checked})
    else:
        tell(f"{kind} {name} ({file})")
        _show(examined, summary)
    if wrong:
        raise typer.Exit(RUN_FAILED)


def _with_verdict(examined: "Sequence[Examined]", verdict: str) -> "list[Examined]":
    return [check for check in examined if check.finding.verdict == verdict]


def _show(examined: "Sequence[Examined]", summary: str) -> None:
    for verdict, mark in _MARKS.items():
        for check in _with_verdict(examined, verdict):
            tell(f"  {mark} {check.subject:<14} {check.finding.found}")
            if check.finding.expected:
                tell(f"{_INDENT}expected: {check.finding.expected}")
            if check.finding.mend:
                tell(f"{_INDENT}fix: {check.finding.mend}")
    problems, warnings = (
        _with_verdict(examined, verdict) for verdict in ("problem", "warning")
    )
    counts = [counted(len(warnings), "warning")] if warnings else []
    if problems:
        subjects = ", ".join(check.subject for check in problems)
        counts = [*counts, f"{counted(len(problems), 'problem')}: {subjects}"]
    if not counts:
        tell(f"{summary}.")
    else:
        tell(f"{summary}{'. ' if problems else ', with '}{', '.join(counts)}.")


_REACH = ("address", "port", "tls", "gateway")
_ADMISSION = ("clock", "version", "authority", "certificate", "key", "registration")


def client_verdict(problems: "Sequence[Examined]") -> str:
    """Sum a client's problems up in a sentence."""
    by_subject = {problem.subject: problem.finding.found for problem in problems}
    for subjects, verdict in (
        (_REACH, "The server cannot be reached"),
        (_ADMISSION, "The server is there, and this client cannot join it"),
    ):
        for subject in subjects:
            if subject in by_subject:
                return f"{verdict}: {by_subject[subject]}"
    return "The server can be reached, and this client has faults of its own"


def server_verdict(problems: "Sequence[Examined]") -> str:
    """Sum a server's problems up in a sentence."""
    if any(problem.subject == "server" for problem in problems):
        return "The server is down: no client can connect, and no run can begin"
    return "The server runs, with faults"
