"""What can go wrong while a page is run is told."""

from pathlib import Path
from typing import Any

import pytest

from tests.docs.tutorials.running import (
    Listing,
    changed,
    difference,
    listings_of,
    run_listings,
)
from tests.processes import Commands

PAGE = """# Page

Save this as `folder/first.yaml`:

```yaml
name: first
```

```sh
knnper simulate first.yaml
```

```text
done
```

In `folder/first.yaml`:

```diff
-name: first
+name: second
```

```sh
ls
```
"""


def test_listings_in_order(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert listings_of(page) == [
        Listing(5, "yaml", "name: first\n", "folder/first.yaml"),
        Listing(9, "sh", "knnper simulate first.yaml\n", output="done\n"),
        Listing(19, "diff", "-name: first\n+name: second\n", "folder/first.yaml"),
        Listing(24, "sh", "ls\n"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```text\ndone\n```\n", "line 1: an output follows no commands"),
        ("Save this:\n\n```yaml\na: 1\n```\n", "line 3: the line before must end"),
        (
            "As `a.toml`:\n\n```toml\na = 1\n```\n",
            "line 3: expected .*, found toml",
        ),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path: Path, text: str, message: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=message):
        listings_of(page)


def test_a_change_replaces_whole_lines() -> None:
    text = "first\nsecond\n\nthird\n"
    assert changed(text, " first\n-second\n+other\n\n+more\n") == (
        "first\nother\n\nmore\nthird\n"
    )


@pytest.mark.parametrize(
    ("change", "count"), [("-a\n", 0), (" b\n+c\n", 2), (" line\n+c\n", 0)]
)
def test_a_change_must_fit_in_one_place(change: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"found them {count} times"):
        changed("b\nb\na line\n", change)


WRITTEN = """progress
│ method │ average │ seconds │
│ FedAvg │ 72.6 %  │ 26.9    │
│ Local  │ 30.0 %  │ 1.0     │
sha256: 00ff

done
"""


@pytest.mark.parametrize(
    "shown",
    [
        "│ FedAvg │ 72.6 % │ 26.9 │\n",
        "│ FedAvg │ 70.1 % │ … │\n",
        "progress\n…\ndone\n",
        "sha256: …\n\ndone\n",
        "│ method │ average │ seconds │\n…\n│ Local  │ … │\n",
        "…\nprogress\n",
    ],
)
def test_what_is_shown_was_written(shown: str) -> None:
    assert difference(shown, WRITTEN) is None


@pytest.mark.parametrize(
    "shown",
    [
        "│ FedAvg │ 62.6 % │ … │\n",
        "│ FedAvg │ 72 % │ … │\n",
        "│ FedProx │ 72.6 % │ … │\n",
        "progress\ndone\n",
        "done\n…\nprogress\n",
        "prog\n",
        "sha256: 00fe\n",
    ],
)
def test_what_is_shown_was_not_written(shown: str) -> None:
    assert difference(shown, WRITTEN) is not None


@pytest.mark.parametrize(
    ("shown", "near", "far"),
    [
        ("took 1000.0 s\n", "took 1049.0 s\n", "took 1051.0 s\n"),
        ("0.9604\n", "0.9208\n", "0.9008\n"),
        ("a 50.0\n", "a 1.0\na 50.0\n", "a 1.0\n"),
    ],
)
def test_numbers_may_differ_by_a_twentieth(shown: str, near: str, far: str) -> None:
    assert difference(shown, near) is None
    assert difference(shown, far) is not None


@pytest.mark.parametrize(
    ("listings", "problem"),
    [
        ([(3, "sh", "kept=1\n"), (7, "sh", "echo $kept\n", None, "1\n")], None),
        (
            [(1, "yaml", "x\n", "a/b.yaml"), (5, "sh", "cat a/b.yaml\n", None, "x\n")],
            None,
        ),
        ([(3, "sh", "echo one\n", None, "two\n")], "line 3: shown:\ntwo"),
        ([(3, "sh", "false\ntrue\n")], "line 3: a command failed:.*false"),
        ([(3, "sh", "exit\n"), (5, "sh", "ls\n", None, "")], "line 5: it was not"),
        ([(3, "diff", "-a\n", "none.py")], "line 3: a command failed"),
        ([(3, "sh", "echo Error; false\n", None, "Error\n")], None),
    ],
)
def test_problems_are_told(
    tmp_path: Path,
    commands: Commands,
    listings: list[tuple[Any, ...]],
    problem: str | None,
) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    found = "\n".join(
        run_listings([Listing(*one) for one in listings], clone, commands)
    )
    if problem is None:
        assert not found
    else:
        assert problem.split(".*")[0] in found
        assert problem.split(".*")[-1] in found
