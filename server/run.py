"""Lead a run from its start or a checkpoint: training, then model distribution."""

import contextlib
import dataclasses
import importlib.util
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knnper.data.site_task import SITES
from knnper.experiment import is_timed_by_clients
from knnper.experiment_file import results_identity, to_document
from knnper.own import explained
from knnper.predictions import RunPredictions
from knnper.server.checkpoints import Checkpoint, CheckpointFolder, History
from knnper.server.distribution import ModelDistribution
from knnper.server.distribution_log import Reported, ShownResults
from knnper.server.example_privacy import example_privacy_summary
from knnper.server.federation import Federation
from knnper.server.observer import Observer, RoundRecord
from knnper.server.private_training import PrivateTraining
from knnper.server.results import summarise_groups, training_summary
from knnper.server.roster import Roster
from knnper.server.rounds import RoundLoop, untrained
from knnper.server.run_folder import RunFolder
from knnper.server.schedule import Schedule, participation_of, schedule_of
from knnper.strategies.catalogue import own_title
from knnper.strategies.core.assembly import Assembly


@contextlib.contextmanager
def scalar_writer(
    folder: Path, first_round: int
) -> Iterator[Callable[[RoundRecord], None]]:
    """Yield a function that adds a round's record to the TensorBoard curves.

    It does nothing where TensorBoard, the extra ``tracking``, is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        yield lambda _: None
        return
    # Loading TensorBoard takes seconds; only the process that leads a run needs it.
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=first_round)

    def write(record: RoundRecord) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "server_round":
                writer.add_scalar(name, value, record["server_round"])

    try:
        yield write
    finally:
        writer.close()


@dataclass(frozen=True)
class Conductor:
    """Leads a federation through training and model distribution."""

    assembly: Assembly
    federation: Federation
    folder: RunFolder
    observer: Observer

    def lead(self, roster: Roster, command: Sequence[str]) -> Mapping[str, Any]:
        """Train, distribute the model, and write the results."""
        self.distribute(self.train(roster, command), roster)
        return self.folder.results()

    @explained()
    def train(self, roster: Roster, command: Sequence[str]) -> Checkpoint:
        """Make the missing rounds; return the last state."""
        experiment = self.assembly.experiment
        identity = results_identity(experiment)
        conditions = {}
        privacy = experiment.privacy
        if privacy is not None and privacy.is_private:
            training = PrivateTraining(self.assembly, len(roster.trainable()))
            conditions["privacy"] = training.plan()
        self.folder.write_manifest(experiment, roster.split, command, conditions)
        most = self.assembly.experiment.run.keep_checkpoints
        checkpoints = CheckpointFolder(self.folder.checkpoints, identity, most)
        latest = checkpoints.load_latest(self.assembly.method.state_type)
        start = latest or untrained(self.assembly, roster)
        self.folder.drop_rounds_after(start.server_round)
        first_round = start.server_round + 1
        self.observer.training_started(self.assembly.method.num_rounds, first_round)
        with scalar_writer(self.folder.tensorboard, first_round) as write_curves:

            def on_round(record: RoundRecord) -> None:
                self.folder.append_round(record)
                write_curves(record)
                self.observer.round_finished(record)

            return RoundLoop(
                self.assembly,
                self.federation,
                roster,
                checkpoints,
                on_round,
                self.folder.drop_rounds_after,
            ).train(start)

    @explained()
    def distribute(
        self, trained: Checkpoint, roster: Roster, to: Collection[str] | None = None
    ) -> Collection[str]:
        """Distribute the model to clients without it; write the results of all.

        ``to`` limits the clients; all if it is None.
        """
        began, seconds = time.monotonic(), 0.0
        if self.folder.is_finished():  # earlier distributions of this run
            earlier = self.folder.results()["training"]
            seconds = float(earlier["personalization_seconds"])
        self._distribute(trained, roster, to)
        reported = self._reported(trained)
        served = [name for name in roster.names() if name in reported]
        if not served:
            return served
        titles = roster.titles()
        results = ShownResults(reported, served, titles)
        document = {
            "method": self.assembly.experiment.method.name,
            "personalization": self.assembly.experiment.personalization.name,
            **own_title(self.assembly.experiment),
            **summarise_groups(results, self._metrics),
            "training": {
                **training_summary(self.folder.rounds(), results),
                "personalization_seconds": time.monotonic() - began + seconds,
                "state_sha256": trained.fingerprint,
                **_left_out(trained.history, titles),
                **self._example_privacy(roster, trained.history),
            },
            "model_distribution": {
                "num_clients": len(served),
                "withheld": [
                    titles.get(name, name)
                    for name in served
                    if name in reported.withheld
                ],
                "offline": [
                    titles.get(name, name)
                    for name in roster.names()
                    if name not in reported
                ],
            },
            "manifest": {
                **self.folder.manifest(),
                "experiment": to_document(self.assembly.experiment),
            },
        }
        predictions = self._predictions
        if predictions is not None:
            predictions.merge({name: titles.get(name, name) for name in served})
        self.folder.write_clients_csv(
            results, self._metrics, self._participation(roster, trained.history)
        )
        self.folder.write_results(document)
        if predictions is not None:
            predictions.forget_parts()
        return served

    def _example_privacy(self, roster: Roster, history: History) -> Mapping[str, Any]:
        """Make the entry of ``results.json`` about the privacy of examples, if any."""
        training, sizes = self.assembly.experiment.training, roster.trainable()
        if training.example_privacy is None or not sizes:
            return {}
        schedule = self._schedule(roster, history)
        summary = example_privacy_summary(self.assembly, sizes, schedule)
        return {"example_privacy": summary}

    def _participation(
        self, roster: Roster, history: History
    ) -> Mapping[str, Mapping[str, float]]:
        assembly, titles = self.assembly, roster.titles()
        if is_timed_by_clients(assembly.experiment.training):
            return participation_of(self.folder.rounds())
        schedule = self._schedule(roster, history)
        participation = schedule.client_figures(assembly.method.num_rounds)
        return {
            titles.get(name, name): figures for name, figures in participation.items()
        }

    def _schedule(self, roster: Roster, history: History) -> Schedule:
        """Make the schedule of a finished run."""
        assembly = self.assembly
        schedule = schedule_of(
            assembly.experiment.training,
            roster.trainable(),
            assembly.method,
            assembly.key,
        )
        schedule.learn(history.gains)
        return schedule

    @property
    def _metrics(self) -> Sequence[str]:
        return self.assembly.experiment.run.metric_names

    @property
    def _predictions(self) -> RunPredictions | None:
        """Predictions that virtual clients write into the run's folder."""
        experiment = self.assembly.experiment
        is_kept = experiment.run.save_predictions and experiment.data.name != SITES
        return RunPredictions(self.folder.path) if is_kept else None

    def _reported(self, trained: Checkpoint) -> Reported:
        """Return the reports of clients that need no further request."""
        reported = self.folder.distributed.reported(trained.fingerprint)
        if (predictions := self._predictions) is None:
            return reported
        places = reported.places.items()
        with_predictions = {
            name: place for name, place in places if predictions.has(name)
        }
        return dataclasses.replace(reported, places=with_predictions)

    def _distribute(
        self, trained: Checkpoint, roster: Roster, to: Collection[str] | None
    ) -> None:
        done = self._reported(trained)
        waiting = roster.names() if to is None else sorted(to)
        waiting = [name for name in waiting if name not in done]
        self.observer.personalization_started(len(waiting))
        # After a restart, no client is known to be online yet.
        self.federation.await_clients(waiting, 0)
        distribution = ModelDistribution(
            self.assembly.method,
            self.federation,
            self.assembly.key,
            self._metrics,
            roster.titles(),
        )
        others = () if to is None else set(roster.names()).difference(to)
        sizes, seen, left_out = roster.sizes(), roster.seen(), {*others, *done}
        for reports in distribution.personalize(trained, sizes, seen, left_out):
            if reports:
                self.folder.distributed.append(trained.fingerprint, reports)
            for _ in reports:
                self.observer.client_personalized()


def _left_out(
    history: History, titles: Mapping[str, str]
) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Make the entry of ``results.json`` about clients left out of the training."""
    clients = [
        {"client": titles.get(name, name), **details}
        for name, details in sorted(history.left_out.items())
    ]
    return {"left_out": clients} if clients else {}
