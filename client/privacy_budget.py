"""The budget of a site's privacy: ε over an experiment, and over a year."""

import bisect
import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, get_args

from knnper.client.privacy_ledger import (
    PrivacyLedger,
    ProtectedUpdate,
    releases_of,
    site_release,
)
from knnper.client.settings import ClientSettings, SitePrivacySettings
from knnper.client.site_privacy import Protection
from knnper.privacy import epsilon_of
from knnper.privacy_settings import PrivacySettings
from knnper.reasons import Code, SafeField, SafeReason, Word

Period = Literal["run", "year"]
PERIODS: tuple[Period, ...] = get_args(Period)
_YEAR = timedelta(days=365)
_MOST_ROUNDS = 10**6


@dataclass(frozen=True)
class Spending:
    """The ε that a site has spent in a period.

    Attributes
    ----------
    epsilon
        Spent so far, at the site's δ.
    most, rounds_left
        The budget, and how many more updates it allows; None without a budget.
    """

    epsilon: float
    most: float | None
    rounds_left: int | None


@dataclass(frozen=True)
class PrivacyBudget:
    """The budget of an experiment at a site, and what the ledger shows as spent.

    Attributes
    ----------
    state
        The site's state folder.
    experiment, run
        Fingerprint of the experiment, and Flower's number of its run.
    protection
        Of the experiment's updates.
    """

    settings: SitePrivacySettings
    state: Path
    experiment: str
    run: int
    protection: Protection

    @classmethod
    def of(
        cls,
        client: ClientSettings,
        run_privacy: PrivacySettings | None,
        experiment: str,
        run: int = 0,
    ) -> "PrivacyBudget | None":
        """Return the budget at a site; None if the site does not clip its updates."""
        settings = client.limits.privacy
        protection = Protection.of(settings, run_privacy)
        if settings is None or protection is None:
            return None
        return cls(settings, client.state, experiment, run, protection)

    def objections(self, rounds: int, code: Code) -> list[SafeReason]:
        """Return the budgets that ``rounds`` more updates would exceed."""
        return self._objections(PrivacyLedger(self.state).read(), rounds, code)

    def num_updates(self) -> int:
        """Return how many updates of the experiment have been sent."""
        return len(self._counted(PrivacyLedger(self.state).read(), "run"))

    def spend(self, server_round: int) -> list[SafeReason]:
        """Record an update before it is sent; on return it is on disk.

        Return the budgets that it would exceed; it is then not recorded.
        """
        ledger = PrivacyLedger(self.state)
        # Locked, so that two processes cannot both spend the last ε.
        with ledger.locked():
            updates = ledger.read_locked()
            reasons = self._objections(updates, 1, Code.NO_PRIVACY_LEFT)
            if not reasons:
                ledger.append_locked(
                    ProtectedUpdate(
                        time=datetime.now(UTC),
                        run=self.run,
                        experiment=self.experiment,
                        server_round=server_round,
                        **asdict(self.protection),
                    )
                )
        return reasons

    def spending(self) -> dict[Period, Spending]:
        """Return the ε spent and the updates left, by period."""
        updates = PrivacyLedger(self.state).read()
        spending = {}
        for period in PERIODS:
            most = self._most(period)
            after = functools.partial(
                self._epsilon_after, self._counted(updates, period)
            )
            rounds_left = None
            if most is not None:
                numbers = range(1, _MOST_ROUNDS)
                rounds_left = bisect.bisect_right(numbers, most, key=after)
            spending[period] = Spending(after(0), most, rounds_left)
        return spending

    def _objections(
        self, updates: Sequence[ProtectedUpdate], rounds: int, code: Code
    ) -> list[SafeReason]:
        reasons = []
        for period in PERIODS:
            most = self._most(period)
            if most is None:
                continue
            epsilon = self._epsilon_after(self._counted(updates, period), rounds)
            if epsilon > most:
                fields: dict[str, SafeField] = {
                    "period": Word(period, PERIODS),
                    "found": epsilon,
                    "most": most,
                    "delta": self.settings.delta,
                }
                if code is Code.PRIVACY_NEEDED:
                    fields["rounds"] = rounds
                reasons.append(SafeReason(code, **fields))
        return reasons

    def _most(self, period: Period) -> float | None:
        settings = self.settings
        return settings.epsilon_run if period == "run" else settings.epsilon_year

    def _counted(
        self, updates: Sequence[ProtectedUpdate], period: Period
    ) -> list[ProtectedUpdate]:
        if period == "run":
            return [
                update for update in updates if update.experiment == self.experiment
            ]
        begin = datetime.now(UTC) - _YEAR
        return [update for update in updates if update.time > begin]

    def _epsilon_after(self, updates: Sequence[ProtectedUpdate], rounds: int) -> float:
        """Return the ε of updates and ``rounds`` more."""
        further = site_release(self.protection.noise_multiplier, rounds)
        return epsilon_of([*releases_of(updates), further], self.settings.delta)
