"""Which node is registered under which name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    num_train
        Of clients, by name, on how many examples they train, where that is fixed.
    """

    names: Mapping[int, str]
    num_train: Mapping[str, int] = field(default_factory=dict)

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
        found = read_roster(path)
        names = {int(node): one.name for node, one in found.items()}
        counts = {
            one.name: one.num_train
            for one in found.values()
            if one.num_train is not None
        }
        return cls(MappingProxyType(names), MappingProxyType(counts))

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
