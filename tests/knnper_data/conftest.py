from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's cache out of the tests."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KNNPER_CACHE", str(folder))
    return folder
