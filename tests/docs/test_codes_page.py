"""The page of codes against the codes."""

import re
from pathlib import Path

from knnper.reasons import Code

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def test_page_lists_every_code() -> None:
    section = PAGE.read_text().partition("### Codes of a site")[2].partition("\n## ")[0]
    rows = [
        line.split("|")[1] for line in section.splitlines() if line.startswith("| `")
    ]
    listed = re.findall(r"`([^`]+)`", "".join(rows))
    assert sorted(listed) == sorted({code.label for code in Code})
