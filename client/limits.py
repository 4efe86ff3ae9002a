"""What a run may do to this site, and what the site has answered, over all runs.

A server may send another experiment than it introduced, other weights and other rounds,
and may begin a new run whenever it likes. So every message is looked at as if it were
the first, and what was answered is counted on the site's own disk.
"""

import contextlib
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from knnper.client.settings import ClientSettings
from knnper.errors import RefusedError, RunError
from knnper.experiment import Experiment
from knnper.files import JsonLines, make_private
from knnper.models import MODELS
from knnper.reasons import Code, SafeField, SafeReason, Word
from knnper.strategies.catalogue import METHODS, identity_at_sites, method_of
from knnper.strategies.core.training import num_steps, steps_per_epoch

REFUSALS, ANSWERS = "refusals.jsonl", "answers.jsonl"  # in the state folder
MOST = 100
REPEATED = timedelta(days=1)  # within it, the same refusal is noted once
_BEGUN_KEPT = 1000
_TIDIED_BEYOND_BYTES = 10**6

log = logging.getLogger("flwr")

About = Literal["client", "model", "run"]
Kind = Literal["begun", "training", "validation"]
_NEEDED: dict[Kind, Code] = {
    "training": Code.TRAINING_NEEDED,
    "validation": Code.VALIDATION_NEEDED,
}
_NONE_LEFT: dict[Kind, Code] = {
    "training": Code.NO_TRAINING_LEFT,
    "validation": Code.NO_VALIDATION_LEFT,
}
_OWN_CODE = Word("own code", {"own code"})
_ANY_NUMBER = Word("any number of", {"any number of"})


@dataclass(frozen=True)
class RefusalNote:
    """One refusal."""

    time: datetime
    about: About
    reason: str


@dataclass(frozen=True)
class Answer:
    """One answer to a server."""

    time: AwareDatetime
    run: int
    experiment: str
    kind: Kind


_NOTE = TypeAdapter(RefusalNote)
_ANSWERS = TypeAdapter(list[Answer])


def note_refusal(state: Path, about: About, reason: str) -> bool:
    """Write down that there was one now; return whether it is a new one."""
    # What is asked again within a day is not written again, nor is it news that the
    # server repeats why this client refused its run.
    now = _now()
    last = None
    with contextlib.suppress(RunError):  # a damaged file
        last = last_refusal(state)
    if last is not None and last.time > now - REPEATED:
        same = (last.about, last.reason) == (about, reason)
        echo = (last.about, about) == ("run", "client") and last.reason[:100] in reason
        if same or echo:
            return False
    make_private(state)
    notes = JsonLines(state / REFUSALS)
    notes.append(_as_line(RefusalNote(now, about, reason)))
    try:
        found = notes.read()
        if len(found) > MOST:
            notes.replace(found[-MOST:])
    except RunError as error:
        log.warning("%s", error)
    return True


def last_refusal(state: Path) -> RefusalNote | None:
    """Return the last one; None if there was none."""
    notes = JsonLines(state / REFUSALS).read()
    try:
        return _NOTE.validate_python(notes[-1]) if notes else None
    except ValidationError as error:
        damaged = state / REFUSALS
        raise RunError(f"the last line of {damaged} is damaged; remove it") from error


@dataclass(frozen=True)
class Answers:
    """What a site has answered, on its disk."""

    client: ClientSettings

    def read(self) -> list[Answer]:
        """Return the answers that count still, oldest first."""
        lines = self._file.read()
        try:
            found = _ANSWERS.validate_python(lines)
        except ValidationError as error:
            line = error.errors()[0]["loc"][0]
            mend = "remove the file to count answers from nothing"
            damaged = f"entry {line} of {self._file.path} is damaged"
            reason = SafeReason(Code.UNUSABLE_STATE)
            raise RunError(f"{damaged}; {mend}", reason=reason) from error
        if self.client.limits.days is None:
            return found
        begin = datetime.now(UTC) - timedelta(days=self.client.limits.days)
        return [one for one in found if one.time > begin]

    def note(self, answer: Answer) -> None:
        """Write an answer down; on return it is on disk."""
        make_private(self.client.state)
        self._file.append(_as_line(answer))
        if self._file.path.stat().st_size > _TIDIED_BEYOND_BYTES:
            # Runs cost a server nothing: it must not fill the disk with them.
            answers = self.read()
            begun = [one for one in answers if one.kind == "begun"]
            forgotten = set(begun[:-_BEGUN_KEPT])
            self._file.replace(_as_line(o) for o in answers if o not in forgotten)

    def left(self, kind: Kind, answers: Sequence[Answer]) -> float:
        """Return how many more of a kind may be given."""
        most = self._most(kind)
        return math.inf if most is None else most - _count(kind, answers)

    def state(self, kind: Kind, answers: Sequence[Answer]) -> str:
        """Return in words how many of a kind were given, and may be."""
        most, days = self._most(kind), self.client.limits.days
        window = f"in {days} days" if days else "in all"
        of = "any number" if most is None else most
        return f"{_count(kind, answers)} of {of} {window} (limits.{kind}_rounds)"

    def numbers(self, kind: Kind, answers: Sequence[Answer]) -> dict[str, SafeField]:
        """Return the numbers of `state` as fields of a reason, where a limit is set."""
        days = self.client.limits.days
        return {
            "given": _count(kind, answers),
            "most": self._most(kind) or 0,
            "days": _ANY_NUMBER if days is None else days,
        }

    def _most(self, kind: Kind) -> int | None:
        most: int | None = getattr(self.client.limits, f"{kind}_rounds")
        return most

    @property
    def _file(self) -> JsonLines:
        return JsonLines(self.client.state / ANSWERS)


def _count(kind: Kind, answers: Sequence[Answer]) -> int:
    return sum(one.kind == kind for one in answers)


@dataclass(frozen=True)
class Limits:
    """What a site lets a run do; each ``require`` refuses with all reasons at once."""

    client: ClientSettings
    experiment: Experiment
    run: int

    def objections(self) -> list[SafeReason]:
        """Return why the experiment is not one for this site, whoever runs it."""
        limits, experiment = self.client.limits, self.experiment
        reasons = []
        if limits.experiment not in (None, self.fingerprint):
            reasons.append(self._other(Code.OTHER_EXPERIMENT, limits.experiment))
        method, model = experiment.method.name, experiment.model.name
        if limits.methods is not None and method not in limits.methods:
            allowed = _shown(limits.methods, METHODS)
            code, found = Code.METHOD_NOT_ALLOWED, _shown([method], METHODS)
            reasons.append(SafeReason(code, found=found, allowed=allowed))
        if limits.models is not None and model not in limits.models:
            allowed = _shown(limits.models, MODELS)
            code, found = Code.MODEL_NOT_ALLOWED, _shown([model], MODELS)
            reasons.append(SafeReason(code, found=found, allowed=allowed))
        needs_metrics = method_of(experiment.method).needs_metrics
        if needs_metrics and self.client.train and not self.client.share_metrics:
            named = _shown([method], METHODS)
            reasons.append(SafeReason(Code.NEEDS_METRICS, method=named))
        return reasons

    def _other(self, code: Code, expected: str) -> SafeReason:
        """Return a reason with the fingerprints of both experiments."""
        return SafeReason(
            code, found=int(self.fingerprint, 16), expected=int(expected, 16)
        )

    def without_training(self, num_train: int) -> SafeReason | None:
        """Return why the site does not train in any run; None if it does."""
        if not self.client.train:
            return SafeReason(Code.TRAINS_NONE)
        least = self.client.limits.min_examples
        if num_train < least:
            return SafeReason(Code.TOO_FEW_TO_TRAIN, found=num_train, least=least)
        return None

    def objections_to_training(self, num_train: int) -> list[SafeReason]:
        """Return why the site does not train as the experiment says, or at all."""
        if why_none := self.without_training(num_train):
            return [why_none]
        training = self.experiment.training
        steps = num_steps(training, None, num_train)
        per_epoch = steps_per_epoch(num_train, training.batch_size)
        size = min(training.batch_size, num_train)
        return self._too_little(steps, min(steps, per_epoch) * size)

    def require_allowed(self) -> None:
        """Refuse an experiment that is not for this site, or not that of its run."""
        reasons = self.objections()
        begun = [one for one in Answers(self.client).read() if one.run == self.run]
        if begun and begun[0].experiment != self.fingerprint:
            reasons.append(self._other(Code.EXPERIMENT_CHANGED, begun[0].experiment))
        self._require(reasons)
        if not begun:
            self._note("begun")

    def require_plan(self, num_train: int) -> None:
        """Refuse a run that cannot be gone through with, before it begins."""
        training, every = self.experiment.training, self.experiment.run.validate_every
        reasons, needed = [], dict[Kind, int]()
        if self.without_training(num_train) is None:
            reasons += self.objections_to_training(num_train)
            needed["training"] = math.ceil(training.num_rounds * training.participation)
        if self.client.share_metrics:
            # The model distribution is answered with metrics, too.
            needed["validation"] = 1 + (training.num_rounds // every if every else 0)
        answers = Answers(self.client)
        given = answers.read()
        same = [one for one in given if one.experiment == self.fingerprint]
        for kind, number in needed.items():
            # A run that is resumed has had a part of them.
            missing = number - _count(kind, same) % number
            if missing > answers.left(kind, given):
                numbers = answers.numbers(kind, given)
                reasons.append(SafeReason(_NEEDED[kind], missing=missing, **numbers))
        self._require(reasons)

    def require_training(self, num_train: int) -> None:
        """Refuse to train at all, or as the experiment says."""
        self._require(self.objections_to_training(num_train))

    def require_behind(self, trained: Sequence[tuple[int, float]]) -> None:
        """Refuse to send an update behind which there is too little."""
        steps = min((steps for steps, _ in trained), default=0)
        examples = min((examples for _, examples in trained), default=0)
        self._require(self._too_little(steps, examples))

    def count(self, kind: Kind) -> None:
        """Take one answer from those that are left; on return that is on disk."""
        answers = Answers(self.client)
        given = answers.read()
        if answers.left(kind, given) < 1:
            numbers = answers.numbers(kind, given)
            self._require([SafeReason(_NONE_LEFT[kind], **numbers)])
        self._note(kind)

    def _too_little(self, steps: float, examples: float) -> list[SafeReason]:
        limits = self.client.limits
        return [
            SafeReason(code, found=found, least=least)
            for code, found, least in (
                (Code.TOO_FEW_EXAMPLES, examples, limits.min_examples),
                (Code.TOO_FEW_STEPS, steps, limits.min_steps),
            )
            # What is not a number is too little, too.
            if not found >= least - 1e-6
        ]

    def _require(self, reasons: Sequence[SafeReason]) -> None:
        if not reasons:
            return
        refused = RefusedError(reasons)
        if note_refusal(self.client.state, "run", str(refused)):
            log.error("run %d is refused: %s", self.run, refused)
        raise refused

    def _note(self, kind: Kind) -> None:
        answer = Answer(_now(), self.run, self.fingerprint, kind)
        Answers(self.client).note(answer)

    @property
    def fingerprint(self) -> str:
        """What the site knows the experiment by."""
        return identity_at_sites(self.experiment)


def _shown(names: Sequence[str], known: Collection[str]) -> tuple[Word, ...]:
    """Return names as words; a name that is not ``known`` becomes "own code"."""
    words = [Word(name, known) if name in known else _OWN_CODE for name in names]
    return tuple(dict.fromkeys(words))


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _as_line(noted: Answer | RefusalNote) -> dict[str, object]:
    return {**asdict(noted), "time": noted.time.isoformat()}
