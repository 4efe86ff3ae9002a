"""One experiment from start, or from where it was left, to its results."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from knnper.config.document import results_identity, to_document
from knnper.config.errors import RunError
from knnper.transport.codec import canonical, fingerprint
from server.checkpoint import Checkpoint, CheckpointFolder
from server.federation import Federation
from server.hand_over import HandOver
from server.observer import Observer, RoundRecord
from server.rounds import RoundLoop
from simulation.client_runtime import runtime_of
from simulation.machine import compute_device
from simulation.manifest import build_manifest
from simulation.partition.split import fingerprint as partition_fingerprint
from simulation.results import summarise_groups, training_summary
from simulation.run_folder import RunFolder
from simulation.serial_engine import SerialFederation
from simulation.tensorboard import scalar_writer
from simulation.workbench import Workbench, open_workbench
from strategies.core.evaluation import ClientResult


def simulate(
    bench: Workbench, folder: RunFolder, observer: Observer, command: Sequence[str]
) -> Mapping[str, Any]:
    """Run an experiment on the engine it names.

    Parameters
    ----------
    bench
        What to run.
    folder
        Where everything is written; a run that was interrupted goes on from there.
    observer
        Is told of every step.
    command
        What the user typed, for the manifest.

    Returns
    -------
    Mapping
        The content of ``results.json``.

    Raises
    ------
    RunError
        If the run cannot go on, or another process leads it.
    """
    if folder.is_finished():
        return folder.results()

    def body(federation: Federation) -> Mapping[str, Any]:
        return conduct(bench, federation, folder, observer, command)

    try:
        with folder.locked():
            return _play(bench, folder, body)
    finally:
        observer.finished()


def _play(
    bench: Workbench,
    folder: RunFolder,
    body: Callable[[Federation], Mapping[str, Any]],
) -> Mapping[str, Any]:
    if bench.experiment.run.engine == "serial":
        device = compute_device(bench.experiment.run)
        players = bench
        if device.type != "cpu":
            players = open_workbench(bench.experiment, device)
        return body(SerialFederation(runtime_of(players, folder.path)))
    # Ray takes seconds to import, which the serial engine need not wait for.
    from simulation.flower_engine import run_on_flower

    return run_on_flower(bench, folder.path, body)


def conduct(
    bench: Workbench,
    federation: Federation,
    folder: RunFolder,
    observer: Observer,
    command: Sequence[str],
) -> Mapping[str, Any]:
    """Lead ``federation`` through training and hand-over; write the results.

    What a server does, whatever engine plays the clients. Takes up a run that was
    interrupted: rounds after the last checkpoint are repeated, clients that were
    personalised already are not.
    """
    conditions = build_manifest(
        results_identity=results_identity(bench.experiment),
        partition_hash=partition_fingerprint(bench.partition),
        command=command,
        started=datetime.now(UTC),
    )
    manifest = folder.write_manifest(conditions)
    trained = _train(bench, federation, folder, observer)
    personalised, seconds = _personalize(bench, federation, folder, observer, trained)
    results = {
        "method": bench.experiment.method.name,
        **summarise_groups(personalised),
        "training": {
            **training_summary(folder.rounds(), personalised),
            "personalization_seconds": seconds,
            "state_sha256": trained.fingerprint,
        },
        "manifest": {**manifest, "experiment": to_document(bench.experiment)},
    }
    folder.write_clients_csv(personalised)
    folder.write_results(results)
    return folder.results()


def untrained(bench: Workbench) -> Checkpoint:
    """Return what the first round starts from.

    Raises
    ------
    RunError
        If nobody could take part in it.
    """
    clients = bench.clients.trainable()
    if not clients:
        raise RunError(
            "no seen client has training data; expected at least one. Take a larger "
            "partition.alpha, fewer clients or a smaller partition.unseen_fraction"
        )
    state = canonical(bench.method.init(list(clients), bench.key.child("init")))
    return Checkpoint(0, state, fingerprint(state))


def _train(
    bench: Workbench,
    federation: Federation,
    folder: RunFolder,
    observer: Observer,
) -> Checkpoint:
    identity = results_identity(bench.experiment)
    checkpoints = CheckpointFolder(folder.checkpoints, identity)
    start = checkpoints.load_latest(bench.method.state_type) or untrained(bench)
    folder.drop_rounds_after(start.server_round)
    first_round = start.server_round + 1
    observer.training_started(bench.method.num_rounds, first_round)
    with scalar_writer(folder.tensorboard, first_round) as write_curves:

        def on_round(record: RoundRecord) -> None:
            folder.append_round(record)
            write_curves(record)
            observer.round_finished(record)

        return round_loop(bench, federation, checkpoints, on_round).train(start)


def round_loop(
    bench: Workbench,
    federation: Federation,
    checkpoints: CheckpointFolder,
    on_round: Callable[[RoundRecord], None],
) -> RoundLoop:
    """Return the loop that trains the experiment's method over ``federation``."""
    return RoundLoop(
        method=bench.method,
        federation=federation,
        clients=bench.clients.trainable(),
        num_validation=bench.clients.num_validation(),
        training=bench.experiment.training,
        run=bench.experiment.run,
        key=bench.key,
        checkpoints=checkpoints,
        on_round=on_round,
    )


def _personalize(
    bench: Workbench,
    federation: Federation,
    folder: RunFolder,
    observer: Observer,
    trained: Checkpoint,
) -> tuple[list[ClientResult], float]:
    """Return every client's result, sorted by name, and the seconds this took."""
    began = time.monotonic()
    done = folder.load_client_results(trained.fingerprint)
    names = bench.clients.names()
    observer.personalization_started(len(names) - len(done))
    hand_over = HandOver(bench.method, federation, bench.key)
    sizes, seen = bench.clients.sizes(), bench.clients.seen()
    for result in hand_over.personalize(trained, sizes, seen, set(done)):
        folder.append_client_result(trained.fingerprint, result)
        done[result.client] = result
        observer.client_personalized()
    seconds = time.monotonic() - began
    return [done[name] for name in names], seconds
