"""How much the service takes on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a request may cost; each has a default that suits a small machine.

    Attributes
    ----------
    max_request_bytes
        Of a request's body.
    max_inputs
        Of one request: to predict, or to store.
    max_pixels
        Of an image as it is sent, before it is resized.
    body_timeout_s
        In which a body has to arrive.
    queue_timeout_s
        In which work has to begin; nothing that has begun is cut short.
    num_readers
        Threads that predict. One more writes.
    max_waiting
        Requests that wait for a thread, in each of the two queues.
    poll_s
        Between looks at whether a newer model is installed.
    """

    max_request_bytes: int = 16 * 1024 * 1024
    max_inputs: int = 256
    max_pixels: int = 16_000_000
    body_timeout_s: float = 30.0
    queue_timeout_s: float = 30.0
    num_readers: int = 2
    max_waiting: int = 64
    poll_s: float = 1.0
