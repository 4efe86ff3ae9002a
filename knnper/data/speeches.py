"""Find the speeches of each speaker in a play."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from knnper.data.dividing import clean_name

_LOG = logging.getLogger(__name__)
_MUCH = 0.1
_HEADING = re.compile(r"\s*(?:ACT|SCENE)\b")
_DIRECTION = re.compile(r"\[[^\]]*\]")
# HAMLET. To be, or not to be    FIRST LORD:    1 CLOWN.    SECOND CLOWN 2.
_IN_CAPITALS = re.compile(
    r" {0,4}((?:\d+ )?[A-Z][A-Z][A-Z' &,-]*(?: \d+)?)[.:](?:\s+(.*))?$"
)
# First Citizen:    Citizen 2:
_ABOVE = re.compile(r"((?:\d+ )?[A-Z][A-Za-z']*(?: [A-Za-z']+){0,3}(?: \d+)?):\s*()$")
#   Ham. To be, or not to be     as LEAF reads Shakespeare's collected works
_INDENTED = re.compile(
    r"  ((?:\d+ )?[A-Z][A-Za-z]*(?: [A-Za-z]+){0,3}(?: \d+)?)\. (.*)$"
)
_ALL_FORMS = (_IN_CAPITALS, _ABOVE, _INDENTED)


def find_speeches(play: str, source: str = "the play") -> Mapping[str, str]:
    """Return what each speaker says in the order of the play, line by line.

    A speech begins with the speaker's name and a full stop or a colon, on its first
    line or on a line of its own. It ends with the next one, with a blank line after its
    words, or with the heading of an act or a scene. Stage directions in square brackets
    are left out. The names are in capitals.

    Names in small letters look like ordinary lines. They count at the beginning, below
    a blank line and below a heading; those of the indented form also within a speech
    that began with one, since its other lines are indented further.
    """
    lines_of = defaultdict[str | None, list[str]](list)
    for speaker, line in _assign_lines(play):
        lines_of[speaker].append(line)
    nobodys = _without_directions("\n".join(lines_of.pop(None, [])))
    texts = {
        speaker: _without_directions("\n".join(lines))
        for speaker, lines in lines_of.items()
        if speaker is not None
    }
    spoken = {speaker: text for speaker, text in texts.items() if text}
    if spoken:
        _log_unassigned_text(
            nobodys, sum(map(_num_characters, spoken.values())), source
        )
    return spoken


def _log_unassigned_text(nobodys: str, num_said: int, source: str) -> None:
    """Log how much text is neither a speech nor a name, heading or direction."""
    num_lost = _num_characters(nobodys)
    share = num_lost / (num_lost + num_said)
    if share > _MUCH:
        first = nobodys.partition("\n")[0]
        _LOG.warning(
            "%s: %.0f %% of the text belongs to no speaker and is left out, beginning "
            "with %r; a speech ends with a blank line: take out those within speeches, "
            "and see that each begins with a name",
            source,
            100 * share,
            first,
        )
    else:
        _LOG.info("%s: %.1f %% of the text belongs to no speaker", source, 100 * share)


def _num_characters(text: str) -> int:
    """Return how many characters are not blank."""
    return sum(map(len, text.split()))


def _without_directions(text: str) -> str:
    lines = _DIRECTION.sub("", text).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())


def _assign_lines(play: str) -> Iterator[tuple[str | None, str]]:
    """Yield each line with who says it, but for names, headings and blank lines."""
    speaker, has_spoken, is_below_gap = None, False, True
    # How another's speech may begin right below the last one.
    within: tuple[re.Pattern[str], ...] = (_IN_CAPITALS,)
    for line in play.splitlines():
        forms = _ALL_FORMS if is_below_gap else within
        begun = next(filter(None, (form.match(line) for form in forms)), None)
        first = line.strip()
        if begun is not None:
            speaker, first = clean_name(begun[1]).upper(), (begun[2] or "").strip()
            has_spoken = False
            is_indented = begun.re is _INDENTED
            within = (_IN_CAPITALS, _INDENTED) if is_indented else (_IN_CAPITALS,)
        is_heading = _HEADING.match(line) is not None
        if is_heading or (has_spoken and not first):
            speaker = None
        is_below_gap = speaker is None and (is_heading or not first)
        if first and not is_heading:
            has_spoken = speaker is not None
            yield speaker, first
