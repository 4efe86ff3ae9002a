"""The budget of a site's privacy: ε over an experiment, and over a year."""

import bisect
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, get_args

from knnper.client.privacy_ledger import PrivacyLedger, ProtectedUpdate
from knnper.client.settings import ClientSettings, SitePrivacySettings
from knnper.client.site_privacy import applied_privacy
from knnper.privacy import Release, epsilon_of
from knnper.privacy_settings import PrivacySettings
from knnper.reasons import Code, SafeReason, Word

Period = Literal["run", "year"]
PERIODS: tuple[Period, ...] = get_args(Period)
_YEAR = timedelta(days=365)
_MOST_ROUNDS = 10**6

Spending = dict[str, float | None]
"""Under ``epsilon`` what is spent at ``delta``, under ``most`` the budget, and under
``rounds_left`` how many more updates it allows; None without a budget."""


@dataclass(frozen=True)
class PrivacyBudget:
    """The budget of an experiment at a site, and what the ledger shows as spent.

    Attributes
    ----------
    settings
        With the S and σ of the experiment's updates; see `applied_privacy`.
    state
        The site's state folder.
    experiment, run
        Fingerprint of the experiment, and Flower's number of its run.
    """

    settings: SitePrivacySettings
    state: Path
    experiment: str
    run: int = 0

    @classmethod
    def of(
        cls,
        client: ClientSettings,
        run_privacy: PrivacySettings | None,
        experiment: str,
        run: int = 0,
    ) -> "PrivacyBudget | None":
        """Return the budget at a site; None if the site does not clip its updates."""
        site = client.limits.privacy
        if site is None or site.clip_norm is None:
            return None
        settings = applied_privacy(site, run_privacy)
        return cls(settings, client.state, experiment, run)

    def objections(self, rounds: int) -> list[SafeReason]:
        """Return the budgets that ``rounds`` more updates would exceed."""
        return self._objections(PrivacyLedger(self.state).read(), rounds)

    def objections_to_run(self, num_rounds: int) -> list[SafeReason]:
        """Return the budgets that a run of ``num_rounds`` would exceed."""
        updates = PrivacyLedger(self.state).read()
        # A run that is resumed has spent a part of it.
        num_sent = len(self._counted(updates)["run"])
        return self._objections(updates, num_rounds - num_sent % num_rounds)

    def spend(self, server_round: int) -> list[SafeReason]:
        """Record an update before it is sent; on return it is on disk.

        Return the budgets that it would exceed; it is then not recorded.
        """
        assert self.settings.clip_norm is not None, "there is no budget without it"
        update = ProtectedUpdate(
            time=datetime.now(UTC),
            run=self.run,
            experiment=self.experiment,
            server_round=server_round,
            clip_norm=self.settings.clip_norm,
            noise_multiplier=self.settings.noise,
        )
        one_more = functools.partial(self._objections, rounds=1)
        return PrivacyLedger(self.state).append(update, one_more)

    def spending(self) -> dict[Period, Spending]:
        """Return what is spent and left, by period."""
        spending: dict[Period, Spending] = {}
        counted = self._counted(PrivacyLedger(self.state).read())
        for period, most in self._most().items():
            after = functools.partial(self._epsilon_after, counted[period])
            rounds_left = None
            if most is not None:
                numbers = range(1, _MOST_ROUNDS)
                rounds_left = bisect.bisect_right(numbers, most, key=after)
            spending[period] = {
                "epsilon": after(0),
                "most": most,
                "rounds_left": rounds_left,
                "delta": self.settings.delta,
            }
        return spending

    def _objections(
        self, updates: Sequence[ProtectedUpdate], rounds: int
    ) -> list[SafeReason]:
        reasons = []
        counted = self._counted(updates)
        for period, most in self._most().items():
            epsilon = self._epsilon_after(counted[period], rounds)
            if most is not None and epsilon > most:
                reasons.append(
                    SafeReason(
                        Code.NO_PRIVACY_LEFT,
                        rounds=rounds,
                        period=Word(period, PERIODS),
                        found=epsilon,
                        most=most,
                        delta=self.settings.delta,
                    )
                )
        return reasons

    def _most(self) -> Mapping[Period, float | None]:
        settings = self.settings
        return {"run": settings.epsilon_run, "year": settings.epsilon_year}

    def _counted(
        self, updates: Sequence[ProtectedUpdate]
    ) -> Mapping[Period, list[ProtectedUpdate]]:
        """Return the updates that count, by period."""
        begin = datetime.now(UTC) - _YEAR
        return {
            "run": [each for each in updates if each.experiment == self.experiment],
            "year": [each for each in updates if each.time > begin],
        }

    def _epsilon_after(self, updates: Sequence[ProtectedUpdate], rounds: int) -> float:
        """Return the ε of updates and ``rounds`` more.

        Without amplification by sampling: the server chooses who takes part.
        """
        sent = [site_release(update.noise_multiplier) for update in updates]
        further = site_release(self.settings.noise, rounds)
        return epsilon_of([*sent, further], self.settings.delta)


def site_release(noise_multiplier: float, count: int = 1) -> Release:
    """Return releases of a site's updates with noise of σ S.

    Two data sets move the clipped update by up to 2 S, twice what a unit adds to a sum.
    """
    return Release(noise_multiplier / 2, count=count)
