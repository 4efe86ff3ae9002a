"""What a site tells the server, and what stays in its own log."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from client.node.error_text import without_folders
from knnper.config.errors import KnnPerError, RefusedError, RunError
from strategies.core.evaluation import ClientResults, Evaluation

OWN_LOG = "its own log says why"

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Discretion:
    """What of a client's figures and troubles the server learns.

    Attributes
    ----------
    share_metrics
        Whether it learns how the client does, and why something failed.
    """

    share_metrics: bool

    @contextlib.contextmanager
    def around(self, what: str) -> Iterator[None]:
        """Let no error leave the block whose text tells more than it may.

        Parameters
        ----------
        what
            The block does, for the client's log.

        Raises
        ------
        RunError
            In place of any error of the block, which the log has in full.
        RefusedError
            As it is: it is meant for both sides.
        """
        try:
            yield
        except RefusedError:
            raise
        except Exception as error:
            is_known = isinstance(error, KnnPerError | OSError)
            text = str(error) if is_known else f"{type(error).__name__}: {error}"
            log.error("%s failed: %s", what, text, exc_info=not is_known)
            raise RunError(self.reason(text)) from error

    def reason(self, text: str) -> str:
        """Return what the server is told of an error, whose ``text`` is the client's.

        Without folders: how a site calls them is its own affair.
        """
        return without_folders(text) if self.share_metrics else OWN_LOG

    def update(self, update: Any) -> Any:
        """Return a method's update, without its loss if that is not shared.

        The number of examples stays: it is the update's weight in the mean.
        """
        if self.share_metrics:
            return update
        return dataclasses.replace(update, train_loss=math.nan)

    def results(self, results: ClientResults) -> ClientResults:
        """Return who has the model, and how it does there if that is shared."""
        failures = {name: self.reason(text) for name, text in results.failures.items()}
        if self.share_metrics:
            return dataclasses.replace(results, failures=failures)
        names = tuple(result.client for result in results.results)
        return ClientResults((), failures, withheld=names)


def withheld_evaluation() -> Evaluation:
    """Return the evaluation on no example at all."""
    return Evaluation(0, 0, 0.0, (), (), ())
