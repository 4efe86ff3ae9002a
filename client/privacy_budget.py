"""The budget of a site's privacy: ε over an experiment, and over a year."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypedDict, get_args

from knnper.client.privacy_ledger import (
    ProtectedUpdate,
    read_updates,
    record_update,
    spending_lock,
)
from knnper.client.settings import SitePrivacySettings
from knnper.privacy import Release, epsilon_of
from knnper.reasons import Code, SafeReason, Word

Period = Literal["run", "year"]
PERIODS: tuple[Period, ...] = get_args(Period)
_YEAR = timedelta(days=365)


class Spending(TypedDict):
    """ε at δ that updates of a period have spent, and its budget, if there is one."""

    epsilon: float
    most: float | None
    delta: float


@dataclass(frozen=True)
class PrivacyBudget:
    """The budget of an experiment at a site, and what the ledger shows as spent.

    Attributes
    ----------
    settings
        With the S and σ of the experiment's updates; see
        `knnper.client.site_privacy.applied_privacy`.
    state
        The site's state folder.
    experiment
        Fingerprint of the experiment.
    """

    settings: SitePrivacySettings
    state: Path
    experiment: str

    def objections_to_run(self, num_rounds: int) -> list[SafeReason]:
        """Return the budgets that a run of ``num_rounds`` would exceed."""
        updates = read_updates(self.state)
        num_sent = sum(update.experiment == self.experiment for update in updates)
        # A run that is resumed has spent a part of it.
        return self.objections(num_rounds - num_sent % num_rounds)

    def objections(self, rounds: int) -> list[SafeReason]:
        """Return the budgets that ``rounds`` more updates would exceed."""
        return [
            SafeReason(
                Code.NO_PRIVACY_LEFT,
                rounds=rounds,
                period=Word(period, PERIODS),
                found=spending["epsilon"],
                most=spending["most"],
                delta=spending["delta"],
            )
            for period, spending in self.spending(rounds).items()
            if spending["most"] is not None and spending["epsilon"] > spending["most"]
        ]

    def spend(self, server_round: int) -> list[SafeReason]:
        """Record an update before it is sent; on return it is on disk.

        Return the budgets that it would exceed; it is then not recorded.
        """
        # Locked, so that two processes cannot both spend the last ε.
        with spending_lock(self.state):
            reasons = self.objections(rounds=1)
            if not reasons:
                update = ProtectedUpdate(
                    time=datetime.now(UTC),
                    experiment=self.experiment,
                    server_round=server_round,
                    noise_multiplier=self.settings.noise,
                )
                record_update(self.state, update)
        return reasons

    def spending(self, rounds: int = 0) -> dict[Period, Spending]:
        """Return ε after ``rounds`` more updates, and its budget, by period.

        Without amplification by sampling: the server chooses who takes part.
        """
        settings = self.settings
        budgets = {"run": settings.epsilon_run, "year": settings.epsilon_year}
        updates = read_updates(self.state)
        begin = datetime.now(UTC) - _YEAR
        counted = {
            "run": [each for each in updates if each.experiment == self.experiment],
            "year": [each for each in updates if each.time > begin],
        }
        further = site_release(settings.noise, rounds)
        spending: dict[Period, Spending] = {}
        for period in PERIODS:
            sent = [site_release(each.noise_multiplier) for each in counted[period]]
            spending[period] = {
                "epsilon": epsilon_of([*sent, further], settings.delta),
                "most": budgets[period],
                "delta": settings.delta,
            }
        return spending


def site_release(noise_multiplier: float, count: int = 1) -> Release:
    """Return releases of a site's updates with noise of σ S.

    Two data sets move the clipped update by up to 2 S, twice what a unit adds to a sum.
    """
    return Release(noise_multiplier / 2, count=count)
