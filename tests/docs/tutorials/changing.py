"""Change a file as a listing with + and - says: ``python changing.py FILE LISTING``."""

import re
import sys
from pathlib import Path


def changed(text: str, change: str) -> str:
    """Return ``text`` with a change made in the one place where it fits.

    Raises
    ------
    ValueError
        If the lines that should be there are not, or are in several places.
    """
    lines = change.splitlines(keepends=True)
    before = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
    after = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
    places = [
        match.start()
        for match in re.finditer("^", text, re.MULTILINE)
        if text.startswith(before, match.start())
    ]
    if len(places) != 1:
        raise ValueError(
            f"expected these lines once, found them {len(places)} times:\n{before}"
        )
    return text[: places[0]] + after + text[places[0] + len(before) :]


if __name__ == "__main__":
    file, listing = map(Path, sys.argv[1:])
    file.write_text(changed(file.read_text(), listing.read_text()))
