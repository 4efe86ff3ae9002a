"""A site's data from a Python function of its owner."""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field

from knnper.config.errors import DataError, KnnPerError
from knnper.config.suggestions import alternatives
from knnper.data.site.agreement import SiteTask
from knnper.data.site.array_inputs import ArrayInputs
from knnper.data.site.arrays import KEYS, collect_arrays
from knnper.data.site.collected import Collected, SiteSettings
from knnper.data.site.site_data import SiteData

T = TypeVar("T")

_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"


@dataclass(frozen=True)
class PythonSettings(SiteSettings):
    """Which function is called, and with what.

    Attributes
    ----------
    entry
        ``module:function``. The module is looked for beside the client's file first,
        then among the installed ones.
    arguments
        Passed by name, after the folder that relative paths are relative to (a
        `pathlib.Path`) and the task (`SiteTask`, or None where none is known yet).
    """

    entry: Annotated[str, Field(pattern=rf"^{_MODULE}:[A-Za-z_]\w*$")]
    arguments: dict[str, Any] = field(default_factory=dict)


def collect_python(
    settings: PythonSettings, base: Path, task: SiteTask | None
) -> Collected:
    """Return the examples that a function gives: `SiteData`, or a mapping of arrays.

    A mapping is as `collect_arrays` takes it.

    Raises
    ------
    DataError
        If there is no such function, it fails (with the line), or returns something
        else.
    """
    source = f"data.entry {settings.entry}"
    module_name, _, function_name = settings.entry.partition(":")
    with _importable(base, module_name):
        module = _called(lambda: _module(module_name, base), base, source)
        function = _function(module, function_name, source)
        returned = _called(
            lambda: function(base, task, **settings.arguments), base, source
        )
    if isinstance(returned, SiteData):
        return _called(lambda: _of_site_data(returned, source), base, source)
    if not isinstance(returned, Mapping):
        raise DataError(
            f"{source} returned {type(returned).__name__}, expected SiteData or a "
            "mapping of arrays such as inputs and labels"
        )
    for name in returned:
        if name not in KEYS:
            raise DataError(
                f"{source} returned an array {name!r}; {alternatives(str(name), KEYS)}"
            )
    arrays = _called(
        lambda: {name: np.asarray(value) for name, value in returned.items()},
        base,
        source,
    )
    return collect_arrays(arrays, source)


def _function(module: ModuleType, name: str, source: str) -> Callable[..., object]:
    function = getattr(module, name, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if callable(value)]
        raise DataError(
            f"{source}: {module.__file__} has no function {name!r}; "
            f"{alternatives(name, known)}"
        )
    return function  # type: ignore[no-any-return]


def _module(name: str, base: Path) -> ModuleType:
    """Return the module beside the client's file as it is now, or an installed one."""
    place = base.joinpath(*name.split("."))
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            return _fresh(name, file)
    return importlib.import_module(name)


class _AsItIsNow(SourceFileLoader):
    """Compiles the file each time.

    Kept bytecode is told from a changed file by its size and by whole seconds.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of what the file holds."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _fresh(name: str, file: Path) -> ModuleType:
    loader = _AsItIsNow(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "as above"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module there while it is being executed.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _importable(base: Path, name: str) -> Iterator[None]:
    """Let modules in ``base`` import each other inside the block.

    Afterwards ``name`` is the module that it was before, if any.
    """
    before = sys.modules.get(name)
    sys.path.insert(0, str(base))
    try:
        yield
    finally:
        sys.path.remove(str(base))
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before


def _called(call: Callable[[], T], base: Path, source: str) -> T:
    """Return what the owner's code returns; its errors become ours, with the place."""
    try:
        return call()
    except KnnPerError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if Path(one.filename).is_relative_to(base)]
        frame = (own or frames)[-1]
        raise DataError(
            f"{source} failed with {type(error).__name__}: {error} "
            f"({frame.filename}, line {frame.lineno}); mend the function, or its "
            "data.arguments"
        ) from error


def _of_site_data(data: SiteData, source: str) -> Collected:
    """Return data that is split and labelled as what a reader found."""
    parts = list(data.splits())
    class_of = dict(enumerate(data.task.class_names))
    return Collected(
        source=source,
        names=tuple(name for _, part in parts for name in part.names),
        labels=tuple(
            class_of[label]
            for _, part in parts
            for label in part.examples.labels.tolist()
        ),
        inputs=ArrayInputs(
            source, np.concatenate([part.examples.images.numpy() for _, part in parts])
        ),
        splits=tuple(split for split, part in parts for _ in part.names),
        given_splits=frozenset(split for split, _ in parts),
    )
