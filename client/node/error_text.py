"""What of an error's text leaves the machine."""

import re

_QUOTED = re.compile(
    r"""(?<!\w)(?P<quote>['"])[^'"\n]*/(?P<name>[^'"/\n]*)/?(?P=quote)(?!\w)"""
)
_PATH = re.compile(
    r"""(?<![\w:/.~])
    (?:
        (?:~|\.{1,2})?/[^\s'":;,()]*      # absolute, or from a folder that is known
        |
        [^\s'":;,()/]+/[^\s'":;,()]*\.\w+ # relative, of a file with a suffix
    )""",
    re.VERBOSE,
)


def without_folders(text: str) -> str:
    """Return ``text`` with the last part of every path in it instead of the path."""
    named = _QUOTED.sub(lambda found: f"'{found['name']}'", text)
    return _PATH.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], named)
