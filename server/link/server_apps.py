"""Starts the ServerApp of each submitted run as a process of this server.

Flower's ``flower-superexec`` would pass a run's token in the command line, where other
users of the machine can read it, and is not started again once it was killed.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse

from knnper.errors import RunError
from knnper.server.link.registration import ControlPort
from knnper.server.link.replies import Replies
from knnper.server.link.superlink import (
    WARNINGS_VARIABLE,
    SuperLink,
    end_process,
    flower_command,
)
from knnper.transport.credentials import parse_address
from knnper.transport.flower_protocol import ACQUIRE_TASK, PROTOBUF, SERVER_APP
from knnper.transport.polling import ANNOUNCEMENTS_VARIABLE

# How long a submitted run waits at most: each question is a transaction in Flower's
# database.
_ASK_S = 2.0
_CLEAN_S = 5.0
_STANDARD_ERROR = 2

logger = logging.getLogger(__name__)


class ServerApps:
    """The ServerApps' processes."""

    def __init__(self, superlink: SuperLink, follow: Callable[[int], None]) -> None:
        self._superlink = superlink
        # Reads from a pipe for which nodes a ServerApp has sent messages.
        self._follow = follow
        self._running: set[asyncio.Task[None]] = set()
        # Runs without a process; Flower may still have messages of them.
        self._ended: set[int] = set()

    async def keep_starting(self) -> None:
        """Start the ServerApp of each run until cancelled; then end them."""
        try:
            async with self._superlink.http_client() as client:
                while True:
                    acquired = await _acquire_task(client)
                    if acquired is None:
                        await asyncio.sleep(_ASK_S)
                    else:
                        await self._start(acquired)
        finally:
            for running in self._running:
                running.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def keep_deleting(self, replies: Replies) -> None:
        """Have the messages and objects of finished runs deleted until cancelled.

        Flower deletes them only when the run is listed. The runs of an
        earlier start are listed first.
        """
        address = parse_address(self._superlink.address)
        while True:
            try:
                with ControlPort(address, self._superlink.ca) as control:
                    finished = await asyncio.to_thread(control.finished_runs)
            except RunError as error:
                logger.warning("finished runs were not cleaned up: %s", error)
            else:
                for run_id in finished:
                    replies.forget_run(run_id)
                self._ended.difference_update(finished)
            await asyncio.sleep(_CLEAN_S)
            while not self._ended:
                await asyncio.sleep(_CLEAN_S)

    async def _start(self, acquired: AcquireTaskResponse) -> None:
        superlink = self._superlink
        reading, writing = os.pipe()
        warnings = os.dup(_STANDARD_ERROR)
        os.set_blocking(writing, False)
        self._follow(reading)
        try:
            with _file_in_memory(acquired.token.encode()) as token:
                process = await superlink.spawn(
                    str(flower_command(SERVER_APP)),
                    *("--runtime-api-address", superlink.address),
                    *("--token-file", f"/proc/self/fd/{token}"),
                    *superlink.trust,
                    inherited=(token, writing, warnings),
                    variables={
                        ANNOUNCEMENTS_VARIABLE: str(writing),
                        WARNINGS_VARIABLE: str(warnings),
                    },
                )
        finally:
            os.close(writing)
            os.close(warnings)
        running = asyncio.create_task(self._watch(process, acquired.task.run_id))
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _watch(self, process: asyncio.subprocess.Process, run_id: int) -> None:
        try:
            status = await process.wait()
        finally:
            await end_process(process)
        self._ended.add(run_id)
        if status:
            logger.error("the ServerApp of run %d ended with status %d", run_id, status)


async def _acquire_task(client: httpx.AsyncClient) -> AcquireTaskResponse | None:
    """Ask the SuperLink for a run to start; None if there is none, or no answer."""
    request = AcquireTaskRequest(supported_task_types=[SERVER_APP])
    headers = {"content-type": PROTOBUF}
    try:
        answer = await client.post(
            ACQUIRE_TASK, content=request.SerializeToString(), headers=headers
        )
    except httpx.HTTPError:
        return None
    if not answer.is_success:
        return None
    acquired = AcquireTaskResponse.FromString(answer.content)
    return acquired if acquired.token else None


@contextlib.contextmanager
def _file_in_memory(content: bytes) -> Iterator[int]:
    """Yield the descriptor of a file without a name that is never on a disk."""
    descriptor = os.memfd_create("token")
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)
