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

# A package of this name that registers its own operators while it is imported, whatever
# its compiled files are called. A second declaration of the same operator is an error.
FITTING = """
import sys, pathlib
folder = pathlib.Path(place, "torchvision")
folder.mkdir()
(folder / "__init__.py").write_text('''
import torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
''')
sys.path.insert(0, place)
from knnper.process import import_torchvision
assert import_torchvision() is import_torchvision()
"""

# A fitting package whose import fails for another reason.
DAMAGED = FITTING.replace('-> Tensor")', '-> Tensor")\nraise RuntimeError("damaged")')


@pytest.mark.parametrize("script", [AFTER_A_FAILED_IMPORT, FITTING])
def test_imports_in_a_fresh_process(script: str, tmp_path: Path) -> None:
    strictly = f"import warnings; warnings.simplefilter('error'); place = '{tmp_path}'"
    done = run_fresh(f"{strictly}\n{script}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_import_passes_other_errors_on(tmp_path: Path) -> None:
    done = run_fresh(f"place = '{tmp_path}'\n{DAMAGED}", tmp_path)
    assert "RuntimeError: damaged" in done.stderr


def test_a_missing_torchvision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from knnper import process

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ImportError, match="torchvision is not installed"):
        process.import_torchvision()
