"""Limits on what a run may do to this site, and the count of answers over all runs.

A server may send another experiment than it introduced, other weights and other rounds,
and may begin a new run at any time. So every message is checked as if it were the
first, and answers are counted on the site's own disk.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from knnper.client.privacy_budget import PrivacyBudget
from knnper.client.settings import ClientSettings
from knnper.client.site_privacy import applied_privacy, only_weights
from knnper.errors import RefusedError, RunError
from knnper.experiment import Experiment
from knnper.files import JsonLines, make_private
from knnper.models import MODELS
from knnper.reasons import Code, SafeField, SafeReason, Word
from knnper.strategies.catalogue import METHODS, identity_at_sites, method_of
from knnper.strategies.core.training import num_steps, steps_per_epoch

REFUSALS, ANSWERS = "refusals.jsonl", "answers.jsonl"  # in the state folder
MAX_REFUSALS = 100
REPEATED_WITHIN = timedelta(days=1)  # the same refusal is recorded once
_MAX_BEGUN = 1000
_COMPACT_BEYOND_BYTES = 10**6

log = logging.getLogger("flwr")

About = Literal["client", "model", "run"]
Kind = Literal["begun", "training", "validation"]
_TOO_FEW_LEFT: dict[Kind, Code] = {
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
    """A refusal: of this client by the server, of a model, or of a run."""

    time: datetime
    about: About
    reason: str


@dataclass(frozen=True)
class Answer:
    """An answer to a server that counts against the limits."""

    time: AwareDatetime
    run: int
    experiment: str
    kind: Kind


_NOTE = TypeAdapter(RefusalNote)
_ANSWERS = TypeAdapter(list[Answer])


def note_refusal(state: Path, about: About, reason: str) -> bool:
    """Record a refusal; return whether it is new.

    A refusal that repeats the last one within a day is not recorded, nor is the
    server's message that repeats why this client refused its run.
    """
    now = _now()
    last = None
    with contextlib.suppress(RunError):  # a damaged file
        last = last_refusal(state)
    if last is not None and last.time > now - REPEATED_WITHIN:
        is_same = (last.about, last.reason) == (about, reason)
        is_echo = (last.about, about) == ("run", "client")
        if is_same or (is_echo and last.reason[:100] in reason):
            return False
    make_private(state)
    notes = JsonLines(state / REFUSALS)
    notes.append(_as_line(RefusalNote(now, about, reason)))
    try:
        lines = notes.read()
        if len(lines) > MAX_REFUSALS:
            notes.replace(lines[-MAX_REFUSALS:])
    except RunError as error:
        log.warning("%s", error)
    return True


def last_refusal(state: Path) -> RefusalNote | None:
    """Read the last refusal; return None if there was none."""
    lines = JsonLines(state / REFUSALS).read()
    try:
        return _NOTE.validate_python(lines[-1]) if lines else None
    except ValidationError as error:
        raise RunError(
            f"the last line of {state / REFUSALS} is damaged; remove it"
        ) from error


@dataclass(frozen=True)
class Answers:
    """The record of a site's answers, in its state folder."""

    client: ClientSettings

    def read(self) -> list[Answer]:
        """Read the answers of the days that count, oldest first."""
        lines = self._file.read()
        try:
            answers = _ANSWERS.validate_python(lines)
        except ValidationError as error:
            entry = error.errors()[0]["loc"][0]
            raise RunError(
                f"entry {entry} of {self._file.path} is damaged; remove the file to "
                "restart the count",
                reason=SafeReason(Code.UNUSABLE_STATE),
            ) from error
        if self.client.limits.days is None:
            return answers
        begin = datetime.now(UTC) - timedelta(days=self.client.limits.days)
        return [answer for answer in answers if answer.time > begin]

    def note(self, answer: Answer) -> None:
        """Record an answer; on return it is on disk."""
        make_private(self.client.state)
        self._file.append(_as_line(answer))
        if self._file.path.stat().st_size > _COMPACT_BEYOND_BYTES:
            # A server can begin any number of runs: they must not fill the disk.
            answers = self.read()
            begun = [answer for answer in answers if answer.kind == "begun"]
            dropped = set(begun[:-_MAX_BEGUN])
            self._file.replace(
                _as_line(answer) for answer in answers if answer not in dropped
            )

    def num_left(self, kind: Kind, answers: Sequence[Answer]) -> float:
        """Return how many more answers of a kind the limits allow."""
        limit = self._limit(kind)
        return math.inf if limit is None else limit - _count(kind, answers)

    def numbers(self, kind: Kind, answers: Sequence[Answer]) -> dict[str, SafeField]:
        """Return the numbers of a limit as fields of a reason."""
        days = self.client.limits.days
        return {
            "given": _count(kind, answers),
            "most": self._limit(kind) or 0,
            "days": _ANY_NUMBER if days is None else days,
        }

    def _limit(self, kind: Kind) -> int | None:
        limit: int | None = getattr(self.client.limits, f"{kind}_rounds")
        return limit

    @property
    def _file(self) -> JsonLines:
        return JsonLines(self.client.state / ANSWERS)


def _count(kind: Kind, answers: Sequence[Answer]) -> int:
    return sum(answer.kind == kind for answer in answers)


@dataclass(frozen=True)
class Limits:
    """A site's limits on one run; each ``require`` raises with all reasons at once.

    Raises
    ------
    RefusedError
        From the ``require`` methods and `count`, if a limit is exceeded.
    """

    client: ClientSettings
    experiment: Experiment
    run: int

    def objections(self) -> list[SafeReason]:
        """Return why this site rejects the experiment in any run."""
        limits = self.client.limits
        experiment = self.experiment
        reasons = []
        if limits.experiment not in (None, self.fingerprint):
            reasons.append(self._other(Code.OTHER_EXPERIMENT, limits.experiment))
        method = experiment.method.name
        model = experiment.model.name
        for name, allowed, known, code in (
            (method, limits.methods, METHODS, Code.METHOD_NOT_ALLOWED),
            (model, limits.models, MODELS, Code.MODEL_NOT_ALLOWED),
        ):
            if allowed is not None and name not in allowed:
                reasons.append(
                    SafeReason(
                        code,
                        found=_as_words([name], known),
                        allowed=_as_words(allowed, known),
                    )
                )
        if self.client.train:
            reasons += [
                SafeReason(code, method=_as_words([method], METHODS))
                for code in self._objections_to_updates()
            ]
        return reasons

    def _objections_to_updates(self) -> Iterator[Code]:
        """Yield why the updates of the method may not leave the site."""
        privacy = self.client.limits.privacy
        method = method_of(self.experiment.method)
        shares_labels = privacy is None or "label_shares" in privacy.share
        if method.needs_metrics and not (self.client.share_metrics and shares_labels):
            yield Code.NEEDS_METRICS
        if privacy and privacy.clip_norm is not None and not only_weights(method):
            yield Code.NOT_ONLY_WEIGHTS

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
            if self.client.fixed_weight is not None:
                return SafeReason(Code.TOO_LITTLE_DATA)
            return SafeReason(Code.TOO_FEW_TO_TRAIN, found=num_train, least=least)
        return None

    def objections_to_training(self, num_train: int) -> list[SafeReason]:
        """Return why the site rejects the training that the experiment asks for."""
        if reason := self.without_training(num_train):
            return [reason]
        training = self.experiment.training
        steps = num_steps(training, None, num_train)
        per_epoch = steps_per_epoch(num_train, training.batch_size)
        batch_size = min(training.batch_size, num_train)
        return self._too_little(steps, min(steps, per_epoch) * batch_size)

    def require_allowed(self) -> None:
        """Reject an experiment that the limits exclude, or that its run changed."""
        reasons = self.objections()
        begun = [
            answer for answer in Answers(self.client).read() if answer.run == self.run
        ]
        if begun and begun[0].experiment != self.fingerprint:
            reasons.append(self._other(Code.EXPERIMENT_CHANGED, begun[0].experiment))
        self._require(reasons)
        if not begun:
            self._note("begun")

    def objections_to_plan(self, num_train: int) -> list[SafeReason]:
        """Return why the limits would stop a run half-way."""
        training = self.experiment.training
        every = self.experiment.run.validate_every
        reasons = []
        needed = dict[Kind, int]()
        if self.without_training(num_train) is None:
            reasons += self.objections_to_training(num_train)
            needed["training"] = math.ceil(training.num_rounds * training.participation)
            if self.privacy_budget is not None:
                reasons += self.privacy_budget.objections_to_run(needed["training"])
        if self.client.share_metrics:
            # The model distribution is answered with metrics, too.
            needed["validation"] = 1 + (training.num_rounds // every if every else 0)
        answers = Answers(self.client)
        recorded = answers.read()
        same = [answer for answer in recorded if answer.experiment == self.fingerprint]
        for kind, number in needed.items():
            # A run that is resumed has used a part of them.
            missing = number - _count(kind, same) % number
            if missing > answers.num_left(kind, recorded):
                numbers = answers.numbers(kind, recorded)
                reasons.append(
                    SafeReason(_TOO_FEW_LEFT[kind], missing=missing, **numbers)
                )
        return reasons

    def require_plan(self, num_train: int) -> None:
        """Reject a run, before it begins, that the limits would stop half-way."""
        self._require(self.objections_to_plan(num_train))

    def require_training(self, num_train: int) -> None:
        """Reject the training that the experiment asks for, if limits exclude it."""
        reasons = self.objections_to_training(num_train)
        if self.privacy_budget is not None:
            reasons += self.privacy_budget.objections(rounds=1)
        self._require(reasons)

    def spend_privacy(self, server_round: int) -> None:
        """Record that an update is about to leave; on return it is on disk."""
        if self.privacy_budget is not None:
            self._require(self.privacy_budget.spend(server_round))

    def require_enough(self, trained: Sequence[tuple[int, float]]) -> None:
        """Reject sending an update of too few steps or examples.

        ``trained``: Steps and effective examples of each local training.
        """
        steps = min((steps for steps, _ in trained), default=0)
        examples = min((examples for _, examples in trained), default=0)
        self._require(self._too_little(steps, examples))

    def count(self, kind: Kind) -> None:
        """Count one more answer against the limit; on return it is on disk."""
        answers = Answers(self.client)
        recorded = answers.read()
        if answers.num_left(kind, recorded) < 1:
            numbers = answers.numbers(kind, recorded)
            self._require([SafeReason(_NONE_LEFT[kind], **numbers)])
        self._note(kind)

    def _too_little(self, steps: float, examples: float) -> list[SafeReason]:
        limits = self.client.limits
        reasons = [
            SafeReason(code, found=value, least=least)
            for code, value, least in (
                (Code.TOO_FEW_EXAMPLES, examples, limits.min_examples),
                (Code.TOO_FEW_STEPS, steps, limits.min_steps),
            )
            # Negated, so that NaN is too little, too.
            if not value >= least - 1e-6
        ]
        if reasons and self.client.fixed_weight is not None:
            return [SafeReason(Code.TOO_LITTLE_DATA)]
        return reasons

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

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint by which a site recognises the experiment."""
        return identity_at_sites(self.experiment)

    @functools.cached_property
    def privacy_budget(self) -> PrivacyBudget | None:
        """The budget of protected updates; None if the site does not clip them."""
        site = self.client.limits.privacy
        if site is None or site.clip_norm is None:
            return None
        settings = applied_privacy(site, self.experiment.privacy)
        return PrivacyBudget(settings, self.client.state, self.fingerprint)


def _as_words(names: Sequence[str], known: Collection[str]) -> tuple[Word, ...]:
    """Return names as words that may be sent; an unknown one becomes "own code"."""
    words = [Word(name, known) if name in known else _OWN_CODE for name in names]
    return tuple(dict.fromkeys(words))


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _as_line(record: Answer | RefusalNote) -> dict[str, object]:
    return {**asdict(record), "time": record.time.isoformat()}
