"""Names of clients, servers and experiments, which name files and folders as well."""

import re
from typing import Annotated

from pydantic import Field

_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"

Name = Annotated[str, Field(pattern=f"^{_PATTERN}$")]
"""A field of settings that is such a name."""


def is_name(text: str) -> bool:
    """Whether ``text`` is letters, digits, ``.``, ``_``, ``-``, no sign first."""
    return re.fullmatch(_PATTERN, text) is not None
