"""What is wrong with a store."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes
    ----------
    what
        What was found.
    mend
        What to do about it.
    """

    what: str
    mend: str
