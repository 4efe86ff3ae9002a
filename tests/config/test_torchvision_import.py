from pathlib import Path

import pytest

from tests.fresh_process import run_fresh

AFTER_A_FAILED_IMPORT = """
try:
    import torchvision
except RuntimeError:
    pass
from knnper.process import (import_torchvision)
torchvision = import_torchvision()
assert torchvision is import_torchvision()
assert torchvision.models.mobilenet_v2 is not None
"""

# A package of this name whose operators are there, as where the wheels fit.
FITTING = """
import sys, pathlib, torch
folder = pathlib.Path(place, "torchvision")
folder.mkdir()
(folder / "__init__.py").write_text("fits = True")
sys.path.insert(0, place)
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor boxes) -> Tensor")
from knnper import process
assert process.import_torchvision().fits
assert process._declare_operators.cache_info().misses == 0
"""


@pytest.mark.parametrize("script", [AFTER_A_FAILED_IMPORT, FITTING])
def test_imports_in_a_fresh_process(script: str, tmp_path: Path) -> None:
    strictly = f"import warnings; warnings.simplefilter('error'); place = '{tmp_path}'"
    done = run_fresh(f"{strictly}\n{script}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_missing_torchvision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from knnper import process

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="torchvision is not installed"):
        process.import_torchvision()
