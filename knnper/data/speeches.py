"""Find the speeches of each speaker in a play."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from knnper.data.dividing import clean_name

_LOG = logging.getLogger(__name__)
_MAX_UNASSIGNED = 0.1
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
    """Return the lines of each speaker in the order of the play.

    A speech begins with the speaker's name and a full stop or a colon, on its first
    line or on a separate line. It ends with the next speech, with a blank line after
    its text, or with the heading of an act or a scene. Stage directions in square
    brackets are removed. Names are returned in capitals.

    Names that are not in capitals look like ordinary lines. They are recognised at the
    beginning, after a blank line and after a heading; in the indented form also within
    a speech of this form, whose other lines are indented further.
    """
    lines_of = defaultdict[str | None, list[str]](list)
    for speaker, line in _assign_lines(play):
        lines_of[speaker].append(line)
    unassigned = _without_directions("\n".join(lines_of.pop(None, [])))
    texts = {
        speaker: _without_directions("\n".join(lines))
        for speaker, lines in lines_of.items()
        if speaker is not None
    }
    spoken = {speaker: text for speaker, text in texts.items() if text}
    if spoken:
        _log_unassigned_text(
            unassigned, sum(map(_num_characters, spoken.values())), source
        )
    return spoken


def _log_unassigned_text(unassigned: str, num_assigned: int, source: str) -> None:
    """Log how much text is not a speech, name, heading or stage direction."""
    num_unassigned = _num_characters(unassigned)
    share = num_unassigned / (num_unassigned + num_assigned)
    if share > _MAX_UNASSIGNED:
        first = unassigned.partition("\n")[0]
        _LOG.warning(
            "%s: %.0f %% of the text belongs to no speaker and is left out, beginning "
            "with %r; remove blank lines within speeches, which end a speech, and "
            "begin each speech with a name",
            source,
            100 * share,
            first,
        )
    else:
        _LOG.info("%s: %.1f %% of the text belongs to no speaker", source, 100 * share)


def _num_characters(text: str) -> int:
    """Count the characters that are not blank."""
    return sum(map(len, text.split()))


def _without_directions(text: str) -> str:
    lines = _DIRECTION.sub("", text).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())


def _assign_lines(play: str) -> Iterator[tuple[str | None, str]]:
    """Yield the speaker and the text of each line, without names and blank lines.

    The speaker is None for text outside of speeches.
    """
    speaker, has_spoken, is_below_gap = None, False, True
    # Forms in which the next speech may begin without a blank line before it.
    within: tuple[re.Pattern[str], ...] = (_IN_CAPITALS,)
    for line in play.splitlines():
        forms = _ALL_FORMS if is_below_gap else within
        opening = next(filter(None, (form.match(line) for form in forms)), None)
        first = line.strip()
        if opening is not None:
            speaker, first = clean_name(opening[1]).upper(), (opening[2] or "").strip()
            has_spoken = False
            is_indented = opening.re is _INDENTED
            within = (_IN_CAPITALS, _INDENTED) if is_indented else (_IN_CAPITALS,)
        is_heading = _HEADING.match(line) is not None
        if is_heading or (has_spoken and not first):
            speaker = None
        is_below_gap = speaker is None and (is_heading or not first)
        if first and not is_heading:
            has_spoken = speaker is not None
            yield speaker, first
