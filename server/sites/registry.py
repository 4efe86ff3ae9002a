"""Which node is registered under which name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from server.link.roster_file import read_roster


@dataclass(frozen=True)
class Registry:
    """The names that keys are registered under; empty where nobody is.

    Attributes
    ----------
    names
        By Flower's id of the node, which belongs to its key.
    """

    names: Mapping[int, str]

    @classmethod
    def read(cls, path: Path | None) -> "Registry":
        """Return what the file says; nothing without a file.

        Raises
        ------
        RunError
            If it is damaged.
        """
        if path is None:
            return cls(MappingProxyType({}))
        found = {int(node): one.name for node, one in read_roster(path).items()}
        return cls(MappingProxyType(found))

    def objection(self, node: int, name: str) -> str:
        """Return why ``node`` may not go by ``name``; empty if it may."""
        registered = self.names.get(node)
        if not self.names or registered == name:
            return ""
        if registered is None:
            return (
                f"its key is not registered under any name, and it calls itself {name}"
            )
        return (
            f"its key is registered as {registered}, and it calls itself {name}; "
            f"set name: {registered} in its configuration, or use the key of {name}"
        )
