"""Names of a package that are imported when they are asked for."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def modules_by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Return the module of each name, of names in one text by their module."""
    return {name: module for module, text in names.items() for name in text.split()}


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    ``modules``: By name, where it is imported from.
    """

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get_attribute, names
