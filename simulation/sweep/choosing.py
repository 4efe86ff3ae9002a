"""From a sweep on validation data to the one that tests what was chosen."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from knnper.config.errors import RunError
from knnper.config.overrides import parse_overrides
from knnper.config.yaml_text import dump_yaml
from simulation.sweep.figures import PointFigures, column_of
from simulation.sweep.plan import ALONE, Sweep, variants_of
from simulation.sweep.settings import GLOBAL, VARIANT, VariantSettings

_REPLACED = ("method", "personalization")
"""Sections of a variant that stand in place of the base's, even if they are empty."""

LOWER_IS_BETTER = ("accuracy_std", "fraction_degraded", "ece", "log_loss")


def best_points(sweep: Sweep, rows: Sequence[PointFigures]) -> list[PointFigures]:
    """Return the best point of each variant, of equal ones the first.

    A point counts only if it has the figure with every seed: the mean over fewer is
    not to be compared.

    Raises
    ------
    RunError
        If a variant has no such point.
    """
    return [
        _best(name, [row for row in rows if row.variant == name], sweep)
        for name in variants_of(sweep.settings)
    ]


def _best(name: str, rows: Sequence[PointFigures], sweep: Sweep) -> PointFigures:
    column, num_seeds = column_of(sweep.settings), len(sweep.settings.seeds)
    means = {
        number: row.estimates[column].mean or 0.0
        for number, row in enumerate(rows)
        if row.estimates[column].count == num_seeds
    }
    if not means:
        raise RunError(
            f"no point of the variant {name} has the figure {column} with every seed; "
            "choose by another y or group, or change the values that diverge"
        )
    figure = sweep.settings.y.removeprefix(GLOBAL)
    sign = -1 if figure in LOWER_IS_BETTER else 1
    # The first of equal ones: max keeps it.
    return rows[max(means, key=lambda number: sign * means[number])]


def chosen_sweep(sweep: Sweep, best: Sequence[PointFigures]) -> str:
    """Return the file of a sweep that tests the best points, each once a seed."""
    settings = sweep.settings
    variants = variants_of(settings)
    chosen = {
        "chosen" if one.variant == ALONE else one.variant: _fixed(
            variants[one.variant], sweep.overrides, one.values
        )
        for one in best
    }
    document = {
        "name": f"{settings.name}-chosen",
        "evaluate_on": "test",
        "seeds": list(settings.seeds),
        "y": settings.y,
        "group": settings.group,
        **({"x": VARIANT} if len(chosen) > 1 else {}),
        "set": dict(settings.set),
        "base": {key: value for key, value in sweep.shared.items() if key != "name"},
        "variants": chosen,
    }
    return f"# What {settings.name} chose on validation data.\n{dump_yaml(document)}"


def _fixed(
    variant: VariantSettings, overrides: Sequence[str], values: Mapping[str, Any]
) -> dict[str, Any]:
    changed = {".".join(one.path): one.value for one in parse_overrides(overrides, [])}
    plain: dict[str, Any] = to_jsonable_python(variant)
    plain["set"] = {**variant.set, **changed, **values}
    return {
        key: value
        for key, value in plain.items()
        if value is not None and (value or key in _REPLACED)
    }
