"""What an earlier version wrote is opened, and means what it meant.

`tests/golden/writing.py` wrote it. Figures that are computed anew hold on any
processor: to a tolerance that tells other arithmetic from other code.
"""

import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.golden.reading import PARTS, described_service

ARCHIVES = sorted(Path("tests/golden").glob("*.tar.xz"))
# Two rounds of training and a prediction near 0.5 may fall to either side: an example
# or two of the 336. The loss of such a training moves in the sixth digit.
LOOSE = {"resume": 0.01, "sweep": 0.01}
TOLERANCE = 1e-5


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def archive(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def folder(archive: Path, tmp_path: Path) -> Path:
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    return tmp_path


def parts(found: Any, expected: Any) -> list[tuple[object, Any, Any]] | None:
    """Return what both consist of; None if they are to be compared as they are."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return [(key, found.get(key), value) for key, value in expected.items()]
    both_lists = isinstance(expected, list) and isinstance(found, list)
    if both_lists and len(found) == len(expected):
        return list(zip(range(len(found)), found, expected, strict=True))
    return None


def unlike(found: Any, expected: Any, tolerance: float, place: str) -> Iterator[str]:
    """Yield what is other than it was; keys that there were not are right."""
    inner = parts(found, expected)
    if inner is not None:
        for key, one, value in inner:
            yield from unlike(one, value, tolerance, f"{place}.{key}")
    elif isinstance(expected, float) and isinstance(found, float):
        if abs(found - expected) > tolerance * max(1, abs(expected)):
            yield f"{place}: found {found}, expected {expected}"
    elif found != expected:
        yield f"{place}: found {found}, expected {expected}"


def test_there_is_something_to_open() -> None:
    assert ARCHIVES


@pytest.mark.parametrize(
    "part",
    [
        # A sweep starts processes.
        pytest.param(part, marks=pytest.mark.slow if part == "sweep" else [])
        for part in PARTS
    ],
)
def test_it_means_what_it_meant(archive: Path, folder: Path, part: str) -> None:
    path = archive.with_name(archive.name.replace(".tar.xz", ".json"))
    expected = json.loads(path.read_text())[part]
    found = json.loads(json.dumps(PARTS[part](folder)))
    assert not list(unlike(found, expected, LOOSE.get(part, TOLERANCE), part))


def requests(document: Any) -> Mapping[str, set[str]]:
    """Return the fields that each operation requires, and its parameters."""
    schemas = document["components"]["schemas"]

    def fields(schema: Mapping[str, Any]) -> Iterator[str]:
        if "$ref" in schema:
            yield from fields(schemas[schema["$ref"].rpartition("/")[2]])
        yield from schema.get("required", ())
        for other in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from fields(other)

    return {
        f"{verb} {path}": {
            *(f"parameter {one['name']}" for one in operation.get("parameters", ())),
            *(f"answer {status}" for status in operation["responses"]),
            *(
                f"{kind}: {name}"
                for kind, body in operation.get("requestBody", {})
                .get("content", {})
                .items()
                for name in ("taken", *fields(body["schema"]))
            ),
        }
        for path, operations in document["paths"].items()
        for verb, operation in operations.items()
    }


def test_the_service_takes_the_same_requests(folder: Path, tmp_path: Path) -> None:
    expected = requests(json.loads((folder / "openapi.json").read_text()))
    assert requests(described_service(tmp_path)) == expected
    assert any("taken" not in name for one in expected.values() for name in one)
