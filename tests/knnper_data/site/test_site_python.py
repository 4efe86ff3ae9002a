import os
from pathlib import Path

import numpy as np
import pytest

from knnper.client.settings import read_client
from knnper.data.site import open_site
from knnper.data.site_data import SiteData
from knnper.data.site_task import SiteTask
from knnper.errors import ConfigError, OwnCodeError
from tests.knnper_data.site.site_cases import (
    IMAGES,
    classes,
    opened,
    pixels,
    split_of,
    surveyed,
)

ARRAYS = """
import numpy as np
from dataclasses import dataclass

@dataclass
class Size:
    count: int

def load(base, task, count=2, fail=None):
    size = Size(count)
    shape = task.spec.image_shape if task else (4, 4, 3)
    (base / "called").write_text(str(shape))
    inputs = np.zeros((size.count, *shape), np.uint8)
    return {"inputs": inputs, "labels": np.array(["cat"] * size.count)}

def fails(base, task):
    rows = [1, 2]
    return rows[3]

def wrong(base, task):
    return 3

def odd(base, task):
    return {"input": np.zeros((2, 2)), "labels": np.zeros(2)}

def ragged(base, task):
    return {"inputs": [[1], [1, 2]], "labels": [0, 0]}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "own_data.py").write_text(ARRAYS)
    return tmp_path


def test_a_function_beside_the_clients_file(base: Path) -> None:
    data = opened("own_data:load", base, IMAGES, count=5)
    assert classes(data) == {f"{n:05d}": "cat" for n in range(5)}
    assert (base / "called").read_text() == "(4, 4, 3)"
    # Without a task there is none.
    assert surveyed("own_data:load", base).task.class_names == ("cat",)


def test_a_changed_module_is_read_anew(base: Path) -> None:
    opened("own_data:load", base, IMAGES)
    module = base / "own_data.py"
    before = module.stat()
    module.write_text(ARRAYS.replace('["cat"]', '["dog"]'))
    # As if within the same second; the size is the same anyway.
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))
    data = opened("own_data:load", base, IMAGES)
    assert set(classes(data).values()) == {"dog"}


def test_modules_beside_it_can_be_imported(tmp_path: Path) -> None:
    package = tmp_path / "hospital"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "ward.py").write_text(
        "import beside_the_file\n"
        "def load(base, task):\n    return beside_the_file.load(base, task)\n"
    )
    (tmp_path / "beside_the_file.py").write_text(ARRAYS)
    data = opened("hospital.ward:load", tmp_path, IMAGES)
    assert len(classes(data)) == 2


def ready(base: Path, task: SiteTask) -> SiteData:
    np.savez(
        base / "a.npz",
        train_inputs=pixels(2),
        train_labels=np.array([2, 1]),
        validation_inputs=pixels(1),
        validation_labels=np.array([0]),
    )
    return opened("npz", base, task, path="a.npz")


def test_site_data_goes_through_as_it_is(tmp_path: Path) -> None:
    expected = ready(tmp_path, IMAGES)
    data = opened(f"{__name__}:ready", tmp_path, IMAGES)
    assert split_of(data) == split_of(expected)
    assert classes(data) == classes(expected)
    np.testing.assert_array_equal(
        data.train.examples.images, expected.train.examples.images
    )


def wrong_labels(base: Path, task: SiteTask) -> SiteData:
    data = ready(base, task)
    data.train.examples.labels[0] = -1
    return data


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "own_data:fails",
            r"own_data\.py failed:(?s:.*)line 18(?s:.*)IndexError",
        ),
        ("own_data:laod", r"has no 'laod'; did you mean 'load'\?"),
        ("own_data:wrong", "wrong returned int, expected a mapping of arrays"),
        ("own_data:odd", r"an array 'input'; did you mean 'inputs'\?"),
        ("own_data:ragged", "ragged returned values that are not arrays"),
        ("no_such_module:load", "found no module 'no_such_module' in .* or on the"),
        ("broken_data:load", "SyntaxError|cannot be"),
        (f"{__name__}:wrong_labels", "returned the label -1, expected 0 to 2"),
    ],
)
def test_what_goes_wrong_is_shown(base: Path, entry: str, message: str) -> None:
    (base / "broken_data.py").write_text("x = 1\ny = x +\n")
    with pytest.raises(OwnCodeError, match=message):
        opened(entry, base, IMAGES)


def test_the_reference_is_a_name_too(base: Path) -> None:
    file = base / "client.yaml"

    def read(data: str) -> SiteData:
        file.write_text(f"name: a\nserver: b:1\ninsecure: true\ndata: {data}\n")
        settings = read_client(file)
        return open_site(settings.data, settings.base, IMAGES)

    found = read("{name: 'own_data:load', count: 3, label_map: {cat: dog}}")
    assert classes(found) == {f"{n:05d}": "dog" for n in range(3)}
    with pytest.raises(ConfigError, match=r"data\.cuont: unknown .* did you mean"):
        read("{name: 'own_data:load', cuont: 3}")
    with pytest.raises(ConfigError, match=r"has no 'laod'; did you mean 'load'\?"):
        read("{name: 'own_data:laod'}")
