"""Why a client is not in the federation, and how that is mended."""

from knnper.config.errors import RunError
from knnper.transport.foreign_text import printable

_KEY_NEEDED, _NOT_ACCEPTED = 2001, 2004  # Flower's codes


class Refusal(RunError):
    """The server cannot be reached or does not take the client.

    Parameters
    ----------
    message
        What is wrong and how to mend it, in one line.
    lasting
        Whether trying again without a change is of no use.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class NotAcceptedError(Refusal):
    """Flower's one answer to two things: an unknown key, and one that is online.

    Parameters
    ----------
    key
        Which key, such as its file; empty if that is not known.
    doctor
        The command that finds out which of the two it is.
    """

    def __init__(self, key: str = "", doctor: str = "knnper doctor") -> None:
        which = f" ({key})" if key else ""
        super().__init__(
            f"the server does not accept this client's key{which}: either it is not "
            "registered there (send the public key to the operator, who adds it), or a "
            "node with this key is online (one that crashed counts as online for a "
            f"minute). Which of the two: {doctor}"
        )


def refusal_of(code: int, message: str) -> Refusal:
    """Return what Flower's answer means.

    Parameters
    ----------
    code
        Flower's code of the error; 0 without one.
    message
        Its text.
    """
    if code == _NOT_ACCEPTED:
        return NotAcceptedError()
    if code == _KEY_NEEDED:
        return Refusal(
            "the server takes only clients with a key; give `tls` and `key` instead of "
            "`insecure: true`",
            lasting=True,
        )
    reason = printable(" ".join(message.split()))
    return Refusal(f"the server did not take this client: {reason}")


def unknown_key() -> Refusal:
    """Return why a signature is refused."""
    return Refusal(
        "the server refuses this client's signature: the key was removed there, or the "
        "clocks of the two machines differ by more than ten seconds; compare `date`"
    )
