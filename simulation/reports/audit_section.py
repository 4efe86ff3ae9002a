"""The table of an audit: in a report, and on the terminal."""

from knnper.simulation.audit.audit import Audit
from knnper.simulation.audit.figures import AttackResult
from knnper.simulation.reports.table import Table

_HEADER = ("attack", "on", "sample", "figures (95 % interval)")


def audit_table(audit: Audit, title: str) -> Table:
    """Return a row for each attack."""
    return Table(title, _HEADER, tuple(map(_row, audit.results)))


def _row(result: AttackResult) -> tuple[str, ...]:
    samples = ", ".join(f"{count} {noun}" for noun, count in result.samples.items())
    figures = [
        f"{name.replace('_', ' ')} {figure.value:.3g} "
        f"({figure.low:.3g} to {figure.high:.3g})"
        for name, figure in result.figures.items()
    ]
    if (bound := result.epsilon) is not None:
        claim = f"claimed {bound.claimed:.3g}"
        claim += ", CONTRADICTED" if bound.is_violated else ""
        figures.insert(0, f"ε ≥ {bound.lower:.2f} at δ {bound.delta:.1e} ({claim})")
    if result.left_out:
        figures = [f"not possible: {result.left_out}"]
    return (result.attack, result.surface, samples, "; ".join(figures))
