from pathlib import Path

import pytest

from tests.docs.tutorials.changing import changed
from tests.docs.tutorials.listings import Change, Commands, NewFile, listings_of

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
        NewFile(5, "folder/first.yaml", "name: first\n"),
        Commands(9, "knnper simulate first.yaml\n", "done\n"),
        Change(19, "folder/first.yaml", "-name: first\n+name: second\n"),
        Commands(24, "ls\n", None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```text\ndone\n```\n", "line 1: an output follows no commands"),
        ("Save this:\n\n```yaml\na: 1\n```\n", "line 3: the line before must end"),
        (
            "As `a.toml`:\n\n```toml\na = 1\n```\n",
            "line 3: expected one of .*, found toml",
        ),
    ],
)
def test_what_cannot_be_played_is_named(
    tmp_path: Path, text: str, message: str
) -> None:
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
