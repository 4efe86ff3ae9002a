import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "knnper_cli.flower_apps",
        "knnper.simulation.flower_engine",
    ],
)
def test_flower_reports_nothing(module: str) -> None:
    code = (
        f"import {module}; from flwr.supercore import telemetry;"
        "assert telemetry.FLWR_TELEMETRY_ENABLED == '0'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
