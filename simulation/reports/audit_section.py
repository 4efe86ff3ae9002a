"""The table of an audit: in a report, and on the terminal."""

from knnper.simulation.audit.audit import Audit
from knnper.simulation.audit.figures import AttackResult, Interval
from knnper.simulation.reports.table import Table

_HEADER = ("attack", "on", "the attacker has", "sample", "figures (95 % interval)")
_IN_PERCENT = ("tpr", "recognisable", "right_guesses")


def audit_table(audit: Audit, title: str) -> Table:
    """Return a row for each attack."""
    return Table(title, _HEADER, tuple(map(_row, audit.results)))


def _row(result: AttackResult) -> tuple[str, ...]:
    samples = ", ".join(f"{count} {noun}" for noun, count in result.samples.items())
    figures = [
        f"{name.replace('_', ' ')} {_text(name, interval)}"
        for name, interval in result.figures.items()
    ]
    if (bound := result.epsilon) is not None:
        claim = f"claimed {bound.claimed:.3g}"
        claim += ", CONTRADICTED" if bound.is_violated else ""
        figures.insert(0, f"ε ≥ {bound.lower:.2f} at δ {bound.delta:.1e} ({claim})")
    if result.left_out:
        figures = [f"not possible: {result.left_out}"]
    return (result.attack, result.surface, result.access, samples, "; ".join(figures))


def _text(name: str, interval: Interval) -> str:
    scale, unit, digits = 1.0, "", 3
    if name.startswith(_IN_PERCENT):
        scale, unit, digits = 100.0, " %", 1
    elif name.endswith("_db"):
        unit, digits = " dB", 1
    value, low, high = (
        f"{scale * number:.{digits}f}"
        for number in (interval.value, interval.low, interval.high)
    )
    return f"{value}{unit} ({low} to {high})"
