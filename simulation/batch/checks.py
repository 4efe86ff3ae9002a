"""What the file of every batch must keep to: names, titles, seeds and dotted keys."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from knnper.config.errors import Problem
from knnper.config.names import is_name
from knnper.config.overrides import parse_overrides

ITS_OWN = ("name", "run.seed", "run.engine", "partition.evaluate_on")
"""What a batch itself sets in every run."""


def name_problems(names: Iterable[tuple[str, str]]) -> Iterable[Problem]:
    """Yield which of the names cannot name folders.

    Parameters
    ----------
    names
        Where each stands, and what it is.
    """
    for place, name in names:
        if not is_name(name):
            message = f"found {name!r}, expected letters, digits, '.', '_' and '-'"
            yield Problem(place, message)


def seed_problems(seeds: Sequence[int]) -> Iterable[Problem]:
    """Yield a problem if a seed is there twice: its run would count twice."""
    if len(set(seeds)) < len(seeds):
        yield Problem("seeds", f"found {list(seeds)}, expected each one once")


def title_problems(place: str, titles: Mapping[str, str]) -> Iterable[Problem]:
    """Yield what nobody could tell apart in a table.

    Parameters
    ----------
    place
        The key that holds what has a title.
    titles
        By name.
    """
    names: dict[str, str] = {}
    for name, title in titles.items():
        first = names.setdefault(title, name)
        if first != name:
            message = f"found {title!r}, as {first} has; expected a title of its own"
            yield Problem(f"{place}.{name}.title", message)


def changes_of(overrides: Sequence[str], problems: list[Problem]) -> dict[str, Any]:
    """Return overrides by dotted key; what is malformed joins ``problems``."""
    found = parse_overrides(overrides, problems)
    return {".".join(one.path): one.value for one in found}


def keys_set(values: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that values set: of a section those inside it.

    ``{"training": {"momentum": 0.5}}`` sets ``training.momentum``.
    """
    return {leaf for key, value in values.items() for leaf in _leaves(key, value)}


def keys_set_by_any(lists: Mapping[str, Any]) -> set[str]:
    """Return the dotted keys that any value of these lists sets, see `keys_set`.

    What is no list, as a range, is one value.
    """
    return {
        leaf
        for key, values in lists.items()
        for value in (values if isinstance(values, list) else [values])
        for leaf in _leaves(key, value)
    }


def _leaves(key: str, value: Any) -> Iterable[str]:
    # An empty section has no key inside, and is set as a whole.
    if not isinstance(value, Mapping) or not value:
        yield key
        return
    for name, inside in value.items():
        yield from _leaves(f"{key}.{name}", inside)


def clashes(keys: Iterable[str], others: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield which keys set what one of ``others`` sets, each with the first such.

    Those are equal keys, and those of which one lies inside the other: a section that
    is set as a whole replaces all that was set inside it.
    """
    known = sorted(others)
    for key in sorted(keys):
        other = next((one for one in known if _overlap(key, one)), None)
        if other is not None:
            yield key, other


def _overlap(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def as_part_of(key: str, other: str) -> str:
    """Return what to add to a message on two keys that clash; empty if they are one."""
    return "" if key == other else f" with {other}"


def inside_each_other(place: str, keys: Iterable[str]) -> Iterable[Problem]:
    """Yield which of the keys lie inside another one, and so set the same twice."""
    known = set(keys)
    for key in sorted(known):
        for _, other in clashes([key], known - {key}):
            if key.startswith(f"{other}."):
                message = f"is varied with {other} too; take one of the two out"
                yield Problem(f"{place} {key}", message)


def own_problems(batch: str, keys: Mapping[str, Iterable[str]]) -> Iterable[Problem]:
    """Yield what is set although the batch itself sets it.

    Parameters
    ----------
    batch
        What people call it.
    keys
        That are set, by where they stand.
    """
    for place, found in keys.items():
        for key, _ in clashes(found, ITS_OWN):
            message = f"the {batch} itself sets this in every run; take it out"
            yield Problem(f"{place} {key}", message)
