"""Command and option names of 0.1.0, which still work for one version."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "methods": "list methods",
        "datasets": "list data",
        "federation": "fed",
        "server": "fed server",
        "client": "fed client",
        "submit": "fed submit",
        "watch": "fed status",
        "export": "fed export",
        "data check": "site check",
        "onboard": "site onboard",
        "serve": "site serve",
        "doctor": "site doctor",
        "token": "site token",
    }
)

# By the command's new name, or how it begins; an option that is an argument now, the
# first one, has no new name.
OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "fed client": {"--config": ""},
        "site": {"--config": ""},
        "store": {"--run": "--model"},
    }
)


def with_new_names(
    words: Sequence[str],
    num_names: Callable[[list[str]], int],
    notify: Callable[[str], None],
) -> list[str]:
    """Return what was typed behind ``knnper`` in the names of this version."""
    typed = list(words)
    for old, new in COMMANDS.items():
        names = old.split()
        if typed[: len(names)] == names:
            notify(f"`knnper {old}` is `knnper {new}` now; the old name goes soon")
            typed = [*new.split(), *typed[len(names) :]]
            break
    count = num_names(typed)
    command = " ".join(typed[:count])
    for beginning, options in OPTIONS.items():
        if f"{command} ".startswith(f"{beginning} "):
            for old, new in options.items():
                typed = _with_option(typed, count, old, new, notify)
    return typed


def _with_option(
    typed: list[str], count: int, old: str, new: str, notify: Callable[[str], None]
) -> list[str]:
    for place, word in enumerate(typed):
        option, equals, value = word.partition("=")
        if option != old or (not equals and place + 1 == len(typed)):
            continue
        rest = typed[place + 1 :] if equals else typed[place + 2 :]
        value = value if equals else typed[place + 1]
        if new:
            notify(f"{old} is {new} now; the old name goes soon")
            return [*typed[:place], new, value, *rest]
        notify(f"{old} {value} is the argument {value} now; the old name goes soon")
        return [*typed[:count], value, *typed[count:place], *rest]
    return typed
