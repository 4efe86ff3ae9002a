"""One line an event, ours and Flower's, on standard error."""

import logging


def log_to_stderr() -> None:
    """Set up the logging of a process that is a client."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    for chatty in ("httpx", "faiss"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    flower = logging.getLogger("flwr")
    flower.setLevel(logging.INFO)
    for handler in list(flower.handlers):
        flower.removeHandler(handler)
    flower.addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return bool(record.getMessage().strip())
