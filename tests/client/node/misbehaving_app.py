"""A ClientApp that does what the message says; runners import it by name."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import faiss
import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from knnper.client.deadline import process_ends_after

app = ClientApp()
nothing = "no ClientApp"
LONG_S = 60.0


@app.train()
def train(message: Message, context: Context) -> Message:
    answer = ACTIONS[str(message.content.config_records["do"]["what"])]()
    content = RecordDict({"answer": ConfigRecord({"is": answer})})
    return Message(content, reply_to=message)


def _say_who() -> str:
    return f"{os.getpid()} {os.getppid()}"


def _count_threads_of_parent() -> str:
    return str(len(list(Path(f"/proc/{os.getppid()}/task").iterdir())))


def _compute() -> str:
    torch.set_num_threads(2)
    faiss.omp_set_num_threads(2)
    torch.ones(512, 512) @ torch.ones(512, 512)
    index = faiss.IndexFlatL2(4)
    index.add(np.eye(4, dtype=np.float32))
    _, ids = index.search(np.eye(4, dtype=np.float32), 1)
    return str(ids[:, 0].tolist())


def _say_when() -> str:
    return str(time.time())


def _raise() -> str:
    raise ValueError("boom")


def _leave() -> str:
    sys.exit("the app leaves")


def _exit() -> str:
    os._exit(3)


def _be_killed() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def _sleep() -> str:
    time.sleep(LONG_S)
    return ""


def _hang() -> str:
    with process_ends_after(0.2, "the training"):
        return _sleep()


def _hang_without_python() -> str:
    with process_ends_after(0.2, "the training"):
        ctypes.PyDLL(None).sleep(int(LONG_S))  # keeps Python's lock
    return ""


ACTIONS = {
    "who": _say_who,
    "threads": _count_threads_of_parent,
    "compute": _compute,
    "when": _say_when,
    "raise": _raise,
    "leave": _leave,
    "exit": _exit,
    "kill": _be_killed,
    "sleep": _sleep,
    "hang": _hang,
    "hang in C": _hang_without_python,
}
