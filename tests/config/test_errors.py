import importlib
import re
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from knnper.errors import KnnPerError, Problem

PACKAGES = ("knnper", "datastore", "strategies", "client", "server", "simulation")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ConfigError": ([Problem("a.b", "found 1"), Problem("c", "found 2")], "x.yaml"),
    "RequestError": (404, "found none"),
    "ExplodedError": (5, "the loss is infinite", 3),
}


def kinds(base: type[KnnPerError]) -> Iterator[type[KnnPerError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def all_kinds() -> list[type[KnnPerError]]:
    """Return every error of the project, from wherever it is defined."""
    defines_one = re.compile(r"^class \w+\((\w+Error|Refusal)\):", re.MULTILINE)
    for path in (path for one in PACKAGES for path in Path(one).rglob("*.py")):
        if defines_one.search(path.read_text("utf-8")):
            importlib.import_module(".".join(path.with_suffix("").parts))
    return [one for one in kinds(KnnPerError) if one.__module__.startswith(PACKAGES)]


def from_another_process(error: Exception) -> Any:
    return ForkingPickler.loads(ForkingPickler.dumps(error))


def test_errors_of_all_kinds_come_as_they_were() -> None:
    found = all_kinds()
    assert {"ConfigError", "StoreError", "TooManyFailuresError", "Refusal"} <= {
        kind.__name__ for kind in found
    }
    for kind in found:
        error = kind(*ARGUMENTS.get(kind.__name__, ("it is gone",)))
        error.add_note("in the worker")
        again = from_another_process(error)
        assert type(again) is kind
        assert (str(again), vars(again)) == (str(error), vars(error))
