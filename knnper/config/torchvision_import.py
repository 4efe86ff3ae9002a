"""Imports torchvision, also where its wheel does not fit the installed torch."""

import functools
import importlib
import importlib.util
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

# What `import torchvision` refers to at once; no project code calls them.
_OPERATOR_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def import_torchvision() -> ModuleType:
    """Return the module ``torchvision``.

    Next to a torch of another build (say CPU-only beside a CUDA wheel) torchvision's
    compiled operators cannot be loaded, and a plain import then fails on
    ``torchvision::nms``. Their schemas are declared first in that case; where the
    operators load, nothing is declared.

    Raises
    ------
    ImportError
        If torchvision is not installed.
    """
    if not _operators_load(_package_folder()):
        _declare_operators()
    return importlib.import_module("torchvision")


def _package_folder() -> Path:
    """Find the package without importing it: a failed import leaves parts behind."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "torchvision is not installed; install the project's dependencies: "
            "pip install knnper"
        )
    return Path(spec.submodule_search_locations[0])


def _operators_load(package_folder: Path) -> bool:
    """Load the compiled operators as torchvision would; return whether they exist."""
    files = (package_folder / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES)
    extension = next((file for file in files if file.is_file()), None)
    if extension is not None:
        try:
            torch.ops.load_library(str(extension))  # type: ignore[no-untyped-call]
        except OSError:
            return False
    return hasattr(torch.ops.torchvision, "nms")


@functools.cache
def _declare_operators() -> torch.library.Library:
    """Declare the schemas; the cache keeps the library, and so the schemas, alive."""
    library = torch.library.Library(  # type: ignore[no-untyped-call]
        "torchvision", "DEF"
    )
    for schema in _OPERATOR_SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    return library
