import subprocess
import sys

import pytest

CODE = """
import logging, sys
from knnper.client.flower_node import log_to_stderr
log_to_stderr(verbose={verbose})
from flwr.common.logger import log
import flwr.supernode.start_client_internal as loop
print("- - begin", file=sys.stderr)
def as_flower(level, words):
    code = compile("log(level, words)", loop.__file__, "exec")
    exec(code, {{"log": log, "level": level, "words": words}})
as_flower(logging.INFO, "Receiving: train message")
as_flower(logging.ERROR, "Failed to receive")
logging.getLogger("flwr").info("the model is installed")
logging.getLogger("flwr").info("")
"""


@pytest.mark.parametrize("verbose", [False, True])
def test_flowers_own_routine_is_said_only_on_request(verbose: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(verbose=verbose)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stderr.partition("- - begin\n")[2].splitlines()
    said = [line.split(" ", 2)[2] for line in lines]
    routine = ["INFO Receiving: train message"] if verbose else []
    assert said == [*routine, "ERROR Failed to receive", "INFO the model is installed"]
