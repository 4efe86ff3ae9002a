"""From a selection to SQL."""

import json
from collections.abc import Iterable

from datastore.examples import Selection


def where(selection: Selection) -> tuple[str, list[object]]:
    """Return the condition on the table of examples, and what to bind to it."""
    conditions, values = ["1"], list[object]()
    # NumPy's integers are no JSON.
    lists: dict[str, list[int] | list[str] | None] = {
        "id": _integers(selection.ids),
        "external_id": None
        if selection.external_ids is None
        else list(selection.external_ids),
        "label": _integers(selection.labels),
    }
    for column, allowed in lists.items():
        if allowed is not None:
            # One text, because the number of values that can be bound is bounded.
            conditions.append(f"{column} IN (SELECT value FROM json_each(?))")
            values.append(json.dumps(allowed))
    if selection.arrived_from is not None:
        conditions.append("arrival >= ?")
        values.append(selection.arrived_from)
    if selection.arrived_before is not None:
        conditions.append("arrival < ?")
        values.append(selection.arrived_before)
    return " AND ".join(conditions), values


def _integers(numbers: Iterable[int] | None) -> list[int] | None:
    return None if numbers is None else [int(one) for one in numbers]
