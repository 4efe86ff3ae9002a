from pathlib import Path

import pytest

from tests.apps.site_grid import experiment, make_sites
from tests.server.fake_grid import inside_a_run as inside_a_run


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return make_sites(tmp_path, experiment())
