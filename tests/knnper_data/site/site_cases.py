"""Tasks and files that the tests of own data share."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from knnper.data.catalogue import SITE_DATA
from knnper.data.examples import InputSpec
from knnper.data.own_data import OWN_SITE_DATA
from knnper.data.site import open_site, survey_site
from knnper.data.site_data import SiteData, SiteSettings
from knnper.data.site_task import SiteTask
from knnper.errors import Problem
from knnper.own import Door
from knnper.settings import Choice, Settings, parse_settings

NAMES = ("cat", "dog", "fox")
IMAGES = SiteTask(InputSpec((4, 4, 3), 3, (0.5,) * 3, (0.25,) * 3), NAMES)
FEATURES = SiteTask(
    InputSpec((1, 1, 2), 3, (0.0, 1.0), (1.0, 2.0), dtype="float32"), NAMES
)
THREE = SiteTask(
    InputSpec((1, 1, 4), 3, (), (), dtype="token"), ("'a'", "'b'", "unknown")
)


def settings(name: str, **values: Any) -> SiteSettings:
    problems: list[Problem] = []
    parsed = parse_settings(SITE_DATA[name], values, "data", problems)
    assert parsed is not None, problems
    return parsed


def choose(name: str, base: Path, **values: Any) -> Choice[Settings]:
    """Return the choice of a format, or of a function called ``module:function``."""
    if ":" not in name:
        return Choice(name, settings(name, **values))
    own, problems = Door(base).open(name, OWN_SITE_DATA), list[Problem]()
    parsed = parse_settings(own.settings_type, values, "data", problems)
    assert parsed is not None, problems
    return Choice(name, parsed, own.entry)


def opened(name: str, base: Path, task: SiteTask, **values: Any) -> SiteData:
    return open_site(choose(name, base, **values), base, task)


def surveyed(
    name: str, base: Path, task: SiteTask | None = None, **values: Any
) -> SiteData:
    return survey_site(choose(name, base, **values), base, task)


def pixels(count: int, seed: int = 0) -> NDArray[np.uint8]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)


def put_image(path: Path, seed: int) -> NDArray[np.uint8]:
    path.parent.mkdir(parents=True, exist_ok=True)
    image: NDArray[np.uint8] = pixels(1, seed)[0]
    Image.fromarray(image).save(path)
    return image


def classes(data: SiteData) -> dict[str, str]:
    """Return the class of each example by its name."""
    names = data.task.class_names
    return {
        name: names[label]
        for _, part in data.splits()
        for name, label in zip(part.names, part.examples.labels.tolist(), strict=True)
    }


def split_of(data: SiteData) -> dict[str, str]:
    """Return the split of each example by its name."""
    return {name: split for split, part in data.splits() for name in part.names}
