"""One line an event on standard error: ours, and of Flower's what is out of order."""

import logging
from pathlib import Path

import flwr

from knnper.transport.foreign_text import write_harmlessly

_FLOWER = Path(flwr.__file__).parent


def log_to_stderr(*, verbose: bool = False) -> None:
    """Set up the logging of a process that is a client.

    Parameters
    ----------
    verbose
        Whether Flower may say every message that comes and goes, too.
    """
    write_harmlessly("%(asctime)s %(levelname)s %(message)s")
    for chatty in ("httpx", "faiss"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    flower = logging.getLogger("flwr")
    flower.setLevel(logging.INFO)
    for handler in list(flower.handlers):
        flower.removeHandler(handler)
    flower.addFilter(_says_something)
    if not verbose:
        flower.addFilter(_is_no_routine)


def _says_something(record: logging.LogRecord) -> bool:
    return bool(record.getMessage().strip())


def _is_no_routine(record: logging.LogRecord) -> bool:
    # Clients' apps write to the same log: Flower passes that one on, and no other.
    is_flowers = Path(record.pathname).is_relative_to(_FLOWER)
    return record.levelno > logging.INFO or not is_flowers
