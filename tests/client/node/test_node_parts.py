"""A node's lock, its note of itself, and what it says of errors."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.run import RunNotRunningException

from knnper.client import flower_node
from knnper.client.flower_node import (
    Activation,
    NotAcceptedError,
    _as_reply,
    holder,
    is_locked,
    locked,
    refusal_of,
)
from knnper.errors import DataError, RunError


def _of(state: Path) -> Activation:
    with locked(state) as lock:
        return Activation.of(state, lock)


def test_a_node_that_did_not_leave_is_known(tmp_path: Path) -> None:
    assert _of(tmp_path).left_behind() is None
    _of(tmp_path).note(2**63 + 1)
    assert _of(tmp_path).left_behind() == 2**63 + 1
    _of(tmp_path).forget()
    assert _of(tmp_path).left_behind() is None


def test_a_copy_of_the_folder_does_not_put_out_the_original(tmp_path: Path) -> None:
    _of(tmp_path / "original").note(1)
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    assert _of(tmp_path / "copy").left_behind() is None
    on_another_machine = replace(_of(tmp_path / "original"), place="another:1")
    assert on_another_machine.left_behind() is None


def test_a_torn_note_is_none(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text('{"node_id": ')
    assert _of(tmp_path).left_behind() is None


def test_a_folder_has_one_node(tmp_path: Path) -> None:
    state = tmp_path / "new" / "state"
    assert holder(state) is None
    with locked(state):
        assert (holder(state), is_locked(state)) == (os.getpid(), True)
        with pytest.raises(RunError, match=rf"process {os.getpid()}"), locked(state):
            pass
    assert not is_locked(state)
    with locked(state):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with (
        pytest.raises(RunError, match="state cannot be written"),
        locked(tmp_path / "state"),
    ):
        pass


def test_flowers_codes_become_advice() -> None:
    assert isinstance(refusal_of(2004, "[code: 2004] Failed"), NotAcceptedError)
    known = str(NotAcceptedError("a.key, SHA256:x", "knnper site doctor a.yaml"))
    assert "this client's key (a.key, SHA256:x)" in known
    assert known.endswith("Which of the two: knnper site doctor a.yaml")
    without_key = refusal_of(2001, "")
    assert without_key.lasting
    assert "give `tls` and `key`" in str(without_key)


def test_what_is_not_known_is_quoted_in_one_line() -> None:
    refusal = refusal_of(0, "Failed\nbecause of  this")
    assert str(refusal).endswith("did not take this client: Failed because of this")
    assert not refusal.lasting
    long = str(refusal_of(0, "Failed \x1b[2J" + "x" * 10**6))
    assert "Failed \\x1b[2J" in long
    assert len(long) < 1000


def test_a_run_that_ends_while_a_message_is_received_is_a_plain_error() -> None:
    def pull(object_id: str) -> bytes:
        raise RunNotRunningException

    with pytest.raises(RunError, match="the run has ended meanwhile"):
        flower_node._tidied_up(pull_objects)(["an object"], pull_object_fn=pull)


def test_an_error_leaves_without_folders() -> None:
    reason = _as_reply(DataError("'/home/site/patients/x.png' is broken")).reason
    assert reason == "<class 'knnper.errors.DataError'>:<''x.png' is broken'>"


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
