import os
import subprocess
import sys

from knnper import lifeline


def become(parent: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command by way of the program, without the packages around it."""
    program = (sys.executable, "-I", "-S", lifeline.__file__, str(parent))
    return subprocess.run([*program, *command], capture_output=True, text=True)


def test_the_program_becomes_the_command() -> None:
    done = become(os.getpid(), "/bin/echo", "a", "b c")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a b c\n", "")


def test_without_its_parent_nothing_is_run() -> None:
    done = become(1, "/bin/echo", "a")
    assert (done.returncode, done.stdout) == (1, "")


def test_the_command_dies_with_its_parent() -> None:
    code = (
        "import os, subprocess, sys\n"
        f"program = [sys.executable, '-I', {lifeline.__file__!r}, str(os.getpid())]\n"
        "subprocess.Popen([*program, '/bin/sleep', '60'])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    # The pipe is open as long as anyone holds it: until the command, too, has ended.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30)
    assert done.returncode == -9
