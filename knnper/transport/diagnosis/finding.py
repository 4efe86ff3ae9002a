"""One thing that was looked at: what was found, and how it is mended."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

from knnper.config.errors import KnnPerError


class Verdict(StrEnum):
    """How it is, from best to worst."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes
    ----------
    verdict
        How it is.
    found
        What there is; why it was not looked at, where that is so.
    expected
        What there should be; empty where that goes without saying.
    mend
        What to do; empty where nothing is to be done.
    """

    verdict: Verdict
    found: str
    expected: str = ""
    mend: str = ""


def fine(found: str) -> Finding:
    """Return that all is well."""
    return Finding(Verdict.OK, found)


def skipped(why: str) -> Finding:
    """Return that it was not looked at."""
    return Finding(Verdict.SKIPPED, why)


def warning(found: str, mend: str, expected: str = "") -> Finding:
    """Return that it works, and is not as it should be."""
    return Finding(Verdict.WARNING, found, expected, mend)


def problem(found: str, mend: str, expected: str = "") -> Finding:
    """Return that it is wrong."""
    return Finding(Verdict.PROBLEM, found, expected, mend)


def problem_told(sentence: str) -> Finding:
    """Return a problem that is told as ``what is found; how to mend it``."""
    found, _, mend = sentence.partition("; ")
    return problem(found, mend)


@dataclass(frozen=True)
class Check:
    """Something to look at.

    Attributes
    ----------
    subject
        One word or two for what it is; unique among the checks.
    look
        Looks at it.
    needs
        Subjects without which it makes no sense. Those that are not among the checks
        are taken for well.
    """

    subject: str
    look: Callable[[], Finding]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Examined:
    """A subject and what was found of it."""

    subject: str
    finding: Finding

    def as_document(self) -> dict[str, str]:
        """Return plain values."""
        plain = asdict(self.finding)
        return {"subject": self.subject, **{key: str(plain[key]) for key in plain}}


def examine(checks: Iterable[Check]) -> list[Examined]:
    """Look at everything, in order, and leave out what makes no sense any more."""
    examined: list[Examined] = []
    bad: set[str] = set()
    for check in checks:
        missing = [need for need in check.needs if need in bad]
        finding = _unlooked(missing) if missing else _looked(check)
        if finding.verdict in (Verdict.PROBLEM, Verdict.SKIPPED):
            bad.add(check.subject)
        examined.append(Examined(check.subject, finding))
    return examined


def is_well(examined: Iterable[Examined]) -> bool:
    """Return whether nothing is wrong; warnings do not count."""
    return all(one.finding.verdict is not Verdict.PROBLEM for one in examined)


def _unlooked(missing: Iterable[str]) -> Finding:
    return skipped(f"makes sense once this is well: {', '.join(missing)}")


def _looked(check: Check) -> Finding:
    try:
        return check.look()
    except (KnnPerError, OSError) as error:
        return problem_told(str(error))
