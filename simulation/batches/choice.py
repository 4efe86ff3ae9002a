"""The choice of a sweep on validation data, and the sweep that tests it."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from knnper.errors import RunError
from knnper.settings import parse_overrides
from knnper.simulation.batches.figure_names import lower_is_better
from knnper.simulation.batches.sweep import (
    ALONE,
    VARIANT,
    Sweep,
    VariantSettings,
    variants_of,
)
from knnper.simulation.batches.tables import PointRow, column_of
from knnper.yaml_text import dump_yaml

CHOSEN = "chosen.yaml"
# Sections of a variant that replace the base's, even if they are empty.
_REPLACING = ("method", "personalization")


def best_points(sweep: Sweep, rows: Sequence[PointRow]) -> list[PointRow]:
    """Return the best point of each variant, of equal points the first.

    Raises RunError if no point of a variant has the figure with every seed.
    """
    column = column_of(sweep.settings)
    num_seeds = len(sweep.seeds)
    choose = min if lower_is_better(sweep.settings.y) else max
    best = []
    for name in variants_of(sweep.settings):
        # Means over fewer seeds are of other splits.
        complete = [
            row
            for row in rows
            if row.variant == name and row.estimates[column].count == num_seeds
        ]
        if not complete:
            raise RunError(
                f"no point of the variant {name} has the figure {column} with every "
                "seed; choose by another y or group, or change the values that diverge"
            )
        best.append(choose(complete, key=lambda row: row.estimates[column].mean or 0.0))
    return best


def chosen_sweep(sweep: Sweep, best: Sequence[PointRow]) -> str:
    """Return the file of a sweep that tests the best points, once with every seed."""
    settings = sweep.settings
    variants = variants_of(settings)
    chosen = {
        "chosen" if point.variant == ALONE else point.variant: _fix_variant(
            variants[point.variant], sweep.overrides, point.values
        )
        for point in best
    }
    base = {key: value for key, value in sweep.shared.items() if key != "name"}
    # Users' code is not beside the new file.
    code = next(filter(None, (run.own_code for run in sweep.experiments)), None)
    if code is not None:
        base["own_code"] = code
    document = {
        "name": f"{settings.name}-chosen",
        "evaluate_on": "test",
        "seeds": list(settings.seeds),
        "y": settings.y,
        "group": settings.group,
        **({"x": VARIANT} if len(chosen) > 1 else {}),
        "set": dict(settings.set),
        "base": base,
        "variants": chosen,
    }
    return f"# The choice of {settings.name} on validation data.\n{dump_yaml(document)}"


def _fix_variant(
    variant: VariantSettings, overrides: Sequence[str], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a variant with overrides and a point's values, as plain values."""
    changes = {
        ".".join(override.path): override.value
        for override in parse_overrides(overrides, [])
    }
    plain: dict[str, Any] = to_jsonable_python(variant)
    plain["set"] = {**variant.set, **changes, **values}
    return {
        key: value
        for key, value in plain.items()
        if value is not None and (value or key in _REPLACING)
    }
