"""Small files in LEAF's layout."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from knnper.data.leaf_files import User, decode_images, read_users

UserData = Mapping[str, tuple[Sequence[Any], Sequence[Any]]]
"""What each user has: x and y."""


def image(grey: int) -> list[float]:
    """Return an image of one grey as LEAF writes it."""
    return [grey / 255] * 784


def images(*greys: int) -> list[list[float]]:
    return [image(grey) for grey in greys]


def document(data: UserData, **changes: Any) -> dict[str, Any]:
    """Return the content of a file; None as a change leaves the key out."""
    whole = {
        "users": list(data),
        "num_samples": [len(y) for _, y in data.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in data.items()},
        **changes,
    }
    return {key: value for key, value in whole.items() if value is not None}


def write(path: Path, data: UserData, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(data, **changes)), encoding="utf-8")
    return path


DATA: UserData = {"ada": (images(1, 2), [3, 4]), "bob": (images(5), [6])}


def users_of(path: Path) -> list[User]:
    return list(read_users(path, decode_images))
