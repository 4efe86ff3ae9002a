"""A node's lock, note of itself, errors, deadlines and patience."""

import inspect
import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import fleet_http_connection
from flwr.supernode import start_client_internal as main_loop

from knnper.client import flower_node
from knnper.client.activation import Activation, lock_state, node_process
from knnper.client.deadline import DEADLINE_PASSED, Deadline, process_ends_after
from knnper.client.flower_node import _describe_error
from knnper.client.node import require_server
from knnper.client.node_log import WaitLog
from knnper.client.refusal import NotAcceptedError, Refusal, RetryPolicy, refusal_of
from knnper.errors import DataError, RunError
from knnper.transport.credentials import (
    CertifiedKey,
    issue_server_certificate,
    new_authority,
)
from tests.client.doctor.scripted_server import Script, answering, saying, written

pytestmark = pytest.mark.integration


def _of(state: Path) -> Activation:
    with lock_state(state):
        return Activation.of(state)


def test_a_node_that_did_not_leave_is_known(tmp_path: Path) -> None:
    assert _of(tmp_path).left_behind() is None
    _of(tmp_path).note(2**63 + 1)
    assert _of(tmp_path).left_behind() == 2**63 + 1
    _of(tmp_path).forget()
    assert _of(tmp_path).left_behind() is None
    (tmp_path / "node.json").write_text('{"node_id": ')
    assert _of(tmp_path).left_behind() is None, "it is torn"


def test_a_copy_of_the_folder_does_not_put_out_the_original(tmp_path: Path) -> None:
    _of(tmp_path / "original").note(1)
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    assert _of(tmp_path / "copy").left_behind() is None
    on_another_machine = replace(_of(tmp_path / "original"), place="another:1")
    assert on_another_machine.left_behind() is None


def test_a_folder_has_one_node(tmp_path: Path) -> None:
    state = tmp_path / "new" / "state"
    assert node_process(state) is None
    with lock_state(state):
        assert node_process(state) == os.getpid()
        with (
            pytest.raises(RunError, match=rf"process {os.getpid()}"),
            lock_state(state),
        ):
            pass
    assert node_process(state) is None
    with lock_state(state):
        pass
    (tmp_path / "file").write_text("a file")
    with (
        pytest.raises(RunError, match="cannot be written"),
        lock_state(tmp_path / "file"),
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

    with pytest.raises(RunError, match="the run has ended"):
        flower_node._end_with_run(pull_objects)(["an object"], pull_object_fn=pull)


@pytest.mark.parametrize(
    "kind", [DataError, RuntimeError, type("John", (OSError,), {})]
)
def test_reply_to_crash_holds_no_text_of_the_error(kind: type[Exception]) -> None:
    reason = str(
        _describe_error(kind("'/home/site/patients/John.png' is broken")).reason
    )
    assert "John" not in reason
    assert reason.endswith("; the client's own log has the details")


CODE = """
import logging, sys
from knnper.client.node_log import log_to_stderr
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
def test_routine_messages_of_flower_are_logged_only_on_request(verbose: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(verbose=verbose)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stderr.partition("- - begin\n")[2].splitlines()
    messages = [line.split(" ", 2)[2] for line in lines]
    routine = ["INFO Receiving: train message"] if verbose else []
    assert messages == [
        *routine,
        "ERROR Failed to receive",
        "INFO the model is installed",
    ]


HEAD = """
import logging, time
from knnper.client.deadline import Deadline, process_ends_after
logging.basicConfig()
"""

SLEEP = "with process_ends_after(-1, 'the job'):\n    time.sleep(30)\n"

PARTS = """
whole = Deadline.after(0.4)
with whole.ends('reading'):
    time.sleep(0.25)
with whole.ends('the job'):
    time.sleep(0.3)
"""


@pytest.mark.parametrize(("code", "message"), [(SLEEP, "-1 s"), (PARTS, "")])
def test_process_ends_with_its_reason(code: str, message: str) -> None:
    command = [sys.executable, "-c", HEAD + code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == DEADLINE_PASSED
    assert f"the job was not done within {message}" in done.stderr


def test_what_is_done_in_time_lives_on() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with process_ends_after(0.1, "a short job"):
        pass
    time.sleep(0.2)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before
    with Deadline.after(0).ends("a job without one"):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_flower_calls_what_is_replaced() -> None:
    source = inspect.getsource(main_loop)
    assert set(re.findall(r"time\.(\w+)\(", source)) == {"sleep"}
    assert sorted(re.findall(r"time\.sleep\((.*)\)", source)) == ["0.5", "0.5", "3"]
    source = inspect.getsource(fleet_http_connection)
    assert set(re.findall(r"\bos\.(\w+)\(", source)) == {"kill", "getpid"}


class Clock:
    """A clock on which a sleep takes no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def test_repeated_reason_is_logged_at_growing_intervals(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    policy, said_at = RetryPolicy(None), []
    while clock.now < 1000:
        before, now = len(caplog.records), clock.now
        policy.wait(NotAcceptedError())
        said_at += [round(now)] * (len(caplog.records) - before)
    pauses = [after - before for before, after in itertools.pairwise(said_at)]
    assert said_at[0] == 0
    assert [round(pause / 60) for pause in pauses] == [1, 2, 4, 8]


def test_new_reason_is_logged_at_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RetryPolicy(None)
    for reason in ("nothing answers", "nothing answers", "not registered"):
        policy.wait(Refusal(reason))
    messages = [record.getMessage().partition(". ")[0] for record in caplog.records]
    assert messages == ["nothing answers", "not registered"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_waiting_node_logs_at_growing_intervals(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    progress, messages = WaitLog("server:8443"), []

    def idle_for(seconds: float) -> None:
        began = clock.now
        while clock.now < began + seconds:
            with caplog.at_level(logging.INFO):
                progress.idle(clock.now - began)
            clock.now += 1
        messages.append([record.getMessage() for record in caplog.records])
        caplog.clear()

    idle_for(1000)
    progress.received("train", "3")
    idle_for(70)
    assert [line.partition(":")[0] for line in messages[0]] == [
        f"waiting for work, {time}"
        for time in ("60 s", "2 min", "4 min", "8 min", "16 min")
    ]
    assert "no run has asked this client for anything yet" in messages[0][0]
    (line,) = messages[1]
    assert "the update of round 3 is sent" in line


def test_node_logs_that_the_server_is_away_and_back(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    progress = WaitLog("server:8443")
    with caplog.at_level(logging.INFO):
        progress.unreachable("connection refused")
        clock.now += 1
        progress.reachable()  # a single request that failed is no news
        for _ in range(200):
            progress.unreachable("connection refused")
            clock.now += 1
        progress.reachable()
        progress.reachable()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" (")[0] for line in lines] == [
        "waiting for the server: server:8443 has not answered for 5 s",
        "waiting for the server: server:8443 has not answered for 65 s",
        "waiting for the server: server:8443 has not answered for 3 min",
        "the server answers again, after 3 min",
    ]
    assert "connection refused" in lines[0]


def test_it_ends_with_the_reason(clock: Clock) -> None:
    policy, refusal = RetryPolicy(20), Refusal("nothing answers")
    while clock.now < 15:
        policy.wait(refusal)
    with pytest.raises(Refusal, match="nothing answers"):
        policy.wait(refusal)
    assert clock.now <= 20
    now = clock.now
    with pytest.raises(Refusal, match="of no use"):
        RetryPolicy(20).wait(Refusal("of no use", lasting=True))
    assert clock.now == now, "trying again would not mend it"


AUTHORITY = new_authority("a CA")
EXPIRED = issue_server_certificate(AUTHORITY, ["127.0.0.1"], -1)


def refusal(address: str, ca: Path | None) -> Refusal:
    with pytest.raises(Refusal) as caught:
        require_server(address, ca)
    return caught.value


def test_refused_or_dropped_connection_is_retried(tmp_path: Path) -> None:
    with saying(b"") as address:
        assert not refusal(address, written(tmp_path, AUTHORITY, "ca")[0]).lasting
        assert not refusal(address, None).lasting
    unreachable = refusal(address, None)
    assert ("nothing listens at" in str(unreachable), unreachable.lasting) == (
        True,
        False,
    )
    nowhere = str(refusal("no-such-host.invalid:1", None))
    assert "no-such-host.invalid cannot be resolved" in nowhere
    assert "correct `server`" in nowhere


@pytest.mark.parametrize(
    ("serves", "trusts", "words"),
    [(EXPIRED, AUTHORITY, "expired"), (None, AUTHORITY, "HTTP without TLS")],
)
def test_certificate_error_is_not_retried(
    tmp_path: Path, serves: CertifiedKey | None, trusts: CertifiedKey, words: str
) -> None:
    files = None if serves is None else written(tmp_path, serves, "server")
    with answering(Script(), files) as address:
        reason = refusal(address, written(tmp_path, trusts, "ca")[0])
    assert words in str(reason)
    assert reason.lasting
