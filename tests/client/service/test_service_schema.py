"""The OpenAPI document says what the service does: requests are made up from it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from knnper.client.service.bodies import RequestLimits
from knnper.data.examples import InputSpec
from tests.client.service.small_service import FEATURES, TOKEN, asking, small_served

pytestmark = pytest.mark.integration

PICTURE = InputSpec((2, 4, 1), 3, (0.5,), (0.25,))


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="needs schemathesis")
@pytest.mark.parametrize(
    ("spec", "sent", "feature_names"),
    [
        (PICTURE, "2,4,1 uint8", ()),
        pytest.param(FEATURES, "4 float32", (), marks=pytest.mark.slow),
        pytest.param(FEATURES, "4 float32", (*"abcd",), marks=pytest.mark.slow),
    ],
)
def test_made_up_requests_are_answered_as_documented(
    tmp_path: Path, spec: InputSpec, sent: str, feature_names: tuple[str, ...]
) -> None:
    store = tmp_path / "store"
    served = small_served(store, spec=spec, feature_names=feature_names)
    limits = RequestLimits(max_inputs=4)
    with asking(served, limits=limits) as client:
        result = _schemathesis(client, tmp_path, sent)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


def _schemathesis(
    client: httpx.Client, folder: Path, sent: str
) -> "subprocess.CompletedProcess[str]":
    """Return what schemathesis finds: all its phases, all its checks."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run"),
            f"{client.base_url}/openapi.json",
            *("--header", f"Authorization: Bearer {TOKEN}"),
            *("--checks", "all", "--mode", "all"),
            *("--max-examples", "20", "--seed", "1", "--no-color"),
            "--suppress-health-check=all",
        ],
        cwd=folder,
        env={
            **os.environ,
            "KNNPER_TEST_INPUT": sent,
            "SCHEMATHESIS_HOOKS": "picture_formats",
            "PYTHONPATH": str(Path(__file__).parent),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
