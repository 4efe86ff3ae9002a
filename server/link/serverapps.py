"""Starts the ServerApp of each run that was submitted.

Flower has a process for that, ``flower-superexec``, which the SuperLink starts beside
itself. Nobody starts it again when it ends, though no run begins without it, and it
writes each run's token into a command line, where every user of the machine can read
it: with the token one sends messages to all clients. So the SuperLink is told to start
none, and its work, asking for runs and starting a process for each, is done here, in
the process that is there as long as the server is.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from server.link.commands import flower_command
from server.link.processes import Note
from server.link.superlink import SuperLink

logger = logging.getLogger(__name__)

_ASK_S = 0.2  # how long a run that was submitted waits, at most
_PATH = "/v1/runtime/acquire-task"


class ServerApps:
    """The ServerApps' processes.

    Parameters
    ----------
    superlink
        Whose runs they are.
    """

    def __init__(self, superlink: SuperLink) -> None:
        self._superlink = superlink
        self._watched: set[asyncio.Task[None]] = set()

    async def keep_starting(self) -> None:
        """Start each run's, until cancelled."""
        try:
            async with self._superlink.client() as client:
                while True:
                    found = await _acquired(client)
                    if found is not None:
                        Note.is_true(self._superlink.folder)
                    if found is None or not found.token:
                        await asyncio.sleep(_ASK_S)
                    else:
                        await self._start(found)
        finally:
            for watching in self._watched:
                watching.cancel()

    async def _start(self, found: AcquireTaskResponse) -> None:
        superlink = self._superlink
        with _in_memory(found.token.encode()) as token:
            process = await superlink.spawn(
                str(flower_command(TASK_TYPE_TO_COMMAND[TaskType.SERVER_APP])),
                *("--runtime-api-address", superlink.address),
                *("--token-file", f"/proc/self/fd/{token}"),
                *superlink.trust,
                inherited=(token,),
            )
        watching = asyncio.create_task(_watch(process, found.task.run_id))
        self._watched.add(watching)
        watching.add_done_callback(self._watched.discard)


async def _watch(process: asyncio.subprocess.Process, run_id: int) -> None:
    status = await process.wait()
    if status:
        logger.error("the ServerApp of run %d ended with status %d", run_id, status)


async def _acquired(client: httpx.AsyncClient) -> AcquireTaskResponse | None:
    """Return a run that waits; None while the SuperLink does not answer."""
    body = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    headers = {"content-type": PROTOBUF_MEDIA_TYPE}
    try:
        answer = await client.post(
            _PATH, content=body.SerializeToString(), headers=headers
        )
    except httpx.HTTPError:
        return None
    found: AcquireTaskResponse | None = None
    if answer.is_success:
        found = AcquireTaskResponse.FromString(answer.content)
    return found


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """Give a file that has no name and is never on a disk."""
    descriptor = os.memfd_create("token")
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)
