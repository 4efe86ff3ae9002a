"""Records of a method with one field more, for what is put on top of it.

What works with the method's own records works with these too: they have its fields.
"""

import functools
from dataclasses import field, fields, make_dataclass
from typing import Any

from strategies.core.records import Record


def extended(base: type[Record], name: str, new: str, of_type: Any) -> type[Record]:
    """Return a type of records with the fields of ``base`` and one after them.

    Parameters
    ----------
    base
        The method's own type.
    name
        Of the new type.
    new, of_type
        Name and type of the field.

    Raises
    ------
    ValueError
        If ``base`` has a field of that name.
    """
    # mypy takes the hash of a class for that of its instances.
    return _extended(base, name, new, of_type)  # type: ignore[arg-type]


@functools.cache
def _extended(base: type[Record], name: str, new: str, of_type: Any) -> type[Record]:
    """Make the type; one for the same arguments, so that equal types are the same."""
    if new in {one.name for one in fields(base)}:
        raise ValueError(f"{base.__name__} already has a field {new!r}; rename one")
    # By keyword alone, since fields of the base may have defaults.
    extra = (new, of_type, field(kw_only=True))
    namespace = {"__module__": __name__}
    return make_dataclass(
        name, [extra], bases=(base,), namespace=namespace, frozen=True
    )


def with_field(record_type: type[Record], base: Record, **new: Any) -> Record:
    """Return ``base``, with the ``new`` field, as a record of an `extended` type.

    ``base`` may be extended too: a method's payload may be its state.
    """
    names = [one.name for one in fields(record_type) if one.name not in new]
    return record_type(**{name: getattr(base, name) for name in names}, **new)
