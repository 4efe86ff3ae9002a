"""What is served now, and how it is replaced while requests are answered."""

import logging
import threading
from collections.abc import Callable

from client.service.problems import RequestError
from client.service.served import Served
from knnper.config.errors import KnnPerError

_LOG = logging.getLogger(__name__)


class Holder:
    """Opens what is served as soon as it is there, and follows what is installed.

    Nothing that goes wrong ends that: what was served is served on, and it looks again.

    Parameters
    ----------
    open_served
        Opens it; a `KnnPerError` means that there is nothing to serve yet.
    poll_s
        Between two looks.
    """

    def __init__(self, open_served: Callable[[], Served], poll_s: float) -> None:
        self._open, self._poll_s = open_served, poll_s
        self._served: Served | None = None
        self._problem = "the service has just been started"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow")

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why the last look failed, which leaves what is served; empty if it did not.

        Before the first look, and as long as nothing is served, why that is so.
        """
        return self._problem

    def current(self) -> Served:
        """Return what is served.

        Raises
        ------
        RequestError
            503, with the reason, if nothing is.
        """
        if self._served is None:
            raise RequestError(503, f"nothing can be served yet: {self._problem}")
        return self._served

    def close(self) -> None:
        """Stop looking, and close what is served."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._served is not None:
            served, self._served = self._served, None
            served.close()

    def _follow(self) -> None:
        self._look()
        while not self._stopping.wait(self._poll_s):
            self._look()

    def _look(self) -> None:
        try:
            self._renew()
        except KnnPerError as error:
            if str(error) != self._problem:
                _LOG.warning("%s", error)
            self._problem = str(error)
        except Exception as error:  # noqa: BLE001 (a full disk, say, may pass)
            found = f"{type(error).__name__}: {error}"
            if found != self._problem:
                _LOG.exception("the state folder cannot be followed; tried again")
            self._problem = found
        else:
            self._problem = ""

    def _renew(self) -> None:
        if self._served is None:
            self._served = self._open()
            _LOG.info("serving the model %s", self._served.model.fingerprint[:12])
        elif self._served.refresh():
            fingerprint = self._served.model.fingerprint
            _LOG.info("serving the newer model %s", fingerprint[:12])
