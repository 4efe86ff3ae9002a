"""What each speaker of a play says, found in its plain text."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

_HEADING = re.compile(r"\s*(?:ACT|SCENE)\b")
_DIRECTION = re.compile(r"\[[^\]]*\]")
_SPEAKERS = (
    # HAMLET. To be, or not to be    FIRST LORD:
    re.compile(r" {0,4}([A-Z][A-Z][A-Z' &,-]*)[.:](?:\s+(.*))?$"),
    # First Citizen:
    re.compile(r"([A-Z][A-Za-z']*(?: [A-Za-z']+){0,3}):\s*()$"),
    #   Ham. To be, or not to be     as LEAF reads Shakespeare's collected works
    re.compile(r"  ([A-Z][A-Za-z]*(?: [A-Za-z]+){0,3})\. (.*)$"),
)


def speeches_of(play: str) -> Mapping[str, str]:
    """Return what each speaker says in the order of the play, line by line.

    A speech begins with the speaker's name and a full stop or a colon, on its first
    line or on a line of its own. It ends with the next one, with a blank line after its
    words, or with the heading of an act or a scene. Stage directions in square brackets
    are left out. The names are in capitals.

    Parameters
    ----------
    play
        Its plain text, ASCII where punctuation is concerned.
    """
    said = defaultdict[str, list[str]](list)
    for speaker, line in _lines(play):
        said[speaker].append(line)
    texts = {
        speaker: _without_directions("\n".join(lines))
        for speaker, lines in said.items()
    }
    return {speaker: text for speaker, text in texts.items() if text}


def _lines(play: str) -> Iterator[tuple[str, str]]:
    """Yield each spoken line with who says it."""
    speaker, has_spoken = None, False
    for line in play.splitlines():
        begun = _begun(line)
        if begun is not None:
            speaker, first = begun
            has_spoken = False
        else:
            first = line.strip()
        if _HEADING.match(line) or (has_spoken and not first):
            speaker = None
        if speaker is not None and first:
            has_spoken = True
            yield speaker, first


def _begun(line: str) -> tuple[str, str] | None:
    """Return who begins to speak in this line, and what is said in it."""
    for pattern in _SPEAKERS:
        found = pattern.match(line)
        if found is not None:
            return found[1].strip().upper(), (found[2] or "").strip()
    return None


def _without_directions(text: str) -> str:
    lines = _DIRECTION.sub("", text).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())
