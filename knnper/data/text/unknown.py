"""How much of a text is written in characters that are not told apart."""

import logging
from collections import Counter

from knnper.config.errors import DataError
from knnper.data.text.alphabet import ALPHABET

_LOG = logging.getLogger(__name__)

_MANY = 0.05
_MOST = 0.5
_NUM_SHOWN = 5
_WITHOUT_KNOWN = str.maketrans("", "", ALPHABET)


class UnknownCharacters:
    """Counts the characters that are outside of the alphabet.

    All of them are one class: of a text that is made of them, whatever is predicted is
    right.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._num_characters = 0

    def count(self, text: str) -> None:
        """Count the characters of ``text``."""
        self._num_characters += len(text)
        self._counts.update(text.translate(_WITHOUT_KNOWN))

    def require_few(self, source: str) -> None:
        """Warn if more than a twentieth of what was counted is unknown.

        Parameters
        ----------
        source
            Where the texts are, for messages.

        Raises
        ------
        DataError
            If it is more than half.
        """
        num_unknown = self._counts.total()
        share = num_unknown / max(self._num_characters, 1)
        if share <= _MANY:
            return
        message = (
            f"{source}: {share:.0%} of the characters are none of the {len(ALPHABET)} "
            f"that are told apart, most often {self._commonest()}; all of them are one "
            "class, 'unknown': write them in Latin letters, or take them out"
        )
        if share > _MOST:
            raise DataError(message)
        _LOG.warning("%s", message)

    def _commonest(self) -> str:
        # Equally frequent ones in an order that does not depend on the text's.
        ordered = sorted(self._counts.items(), key=lambda pair: (-pair[1], pair[0]))
        return ", ".join(repr(character) for character, _ in ordered[:_NUM_SHOWN])
