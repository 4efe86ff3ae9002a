"""All updates of a round at once, for the methods that compare them."""

from collections.abc import Iterable
from operator import itemgetter

from knnper.config.errors import RunError
from strategies.core.records import ModelUpdate


def hold(updates: Iterable[tuple[str, ModelUpdate]]) -> list[ModelUpdate]:
    """Return all updates, sorted by client: ties then end the same in any order."""
    return [update for _, update in sorted(updates, key=itemgetter(0))]


def require(expected: int, found: int, reason: str) -> None:
    """Raise an error where a rule has too few updates to compare.

    Parameters
    ----------
    expected, found
        Updates of one round, or clients before the first.
    reason
        Where the expected number comes from, as in ``2 f + 3 with f = 1``.

    Raises
    ------
    RunError
        If fewer were found than expected.
    """
    if found < expected:
        raise RunError(
            f"expected at least {expected} clients in a round ({reason}), found "
            f"{found}; raise training.participation or take more clients, or lower "
            "method.num_malicious"
        )
