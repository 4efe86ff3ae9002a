"""One experiment from start, or from where it was left, to its results."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from knnper.client.runtime import ClientRuntime, ClientStateStore
from knnper.errors import KnnPerError
from knnper.process import compute_device, keep_freed_memory
from knnper.records import canonical
from knnper.server.federation import Federation, Reply, Request
from knnper.server.observer import Observer
from knnper.server.run import Conductor
from knnper.server.run_folder import RunFolder
from knnper.simulation.workbench import Workbench, keep_label_counts, open_workbench
from knnper.transport.messages import Purpose


def runtime_of(bench: Workbench, run_folder: Path) -> ClientRuntime:
    """Return the runtime that runs all virtual clients of ``bench``."""
    keep_freed_memory()
    return ClientRuntime(
        method=bench.method,
        spec=bench.task.spec,
        source=bench.clients,
        states=ClientStateStore(run_folder / "clients"),
        key=bench.key,
        pool=bench.task.pool,
    )


@dataclass(frozen=True)
class SerialFederation(Federation):
    """A `Federation` that calls the clients as functions."""

    runtime: ClientRuntime

    def exchange(
        self,
        purpose: Purpose,
        server_round: int,
        keep_rounds: Sequence[int],
        requests: Iterable[Request],
    ) -> Iterator[Reply]:
        """See `Federation.exchange`."""
        for request in requests:
            try:
                record = self._answer(purpose, server_round, keep_rounds, request)
            except KnnPerError as error:
                yield Reply(request.clients, None, str(error))
            else:
                yield Reply(request.clients, canonical(record))

    def _answer(
        self,
        purpose: Purpose,
        server_round: int,
        keep_rounds: Sequence[int],
        request: Request,
    ) -> Any:
        clients, payload = request.clients, canonical(request.payload)
        if purpose is Purpose.TRAIN:
            (client,), (state_round,) = clients, request.state_rounds
            return self.runtime.train(
                client, payload, server_round, state_round, keep_rounds
            )
        if purpose is Purpose.VALIDATE:
            return self.runtime.validate(clients, payload)
        reference, rounds = canonical(request.reference), request.state_rounds
        return self.runtime.personalize(clients, payload, reference, rounds)


def simulate(
    bench: Workbench, folder: RunFolder, observer: Observer, command: Sequence[str]
) -> Mapping[str, Any]:
    """Run an experiment on the engine it names."""
    if folder.is_finished():
        return folder.results()

    def body(federation: Federation) -> Mapping[str, Any]:
        conductor = Conductor(bench, federation, folder, observer)
        return conductor.lead(bench.roster, command)

    try:
        with folder.locked():
            keep_label_counts(bench.clients, folder.path)
            return _play(bench, folder, body)
    finally:
        observer.finished()


def _play(
    bench: Workbench, folder: RunFolder, body: Callable[[Federation], Mapping[str, Any]]
) -> Mapping[str, Any]:
    if bench.experiment.run.engine == "serial":
        device = compute_device(bench.experiment.run)
        workers = bench
        if device.type != "cpu":
            workers = open_workbench(bench.experiment, device, bench.task.pool)
        return body(SerialFederation(runtime_of(workers, folder.path)))
    # Ray takes seconds to import, which the serial engine need not wait for.
    from knnper.simulation.flower_engine import run_on_flower

    return run_on_flower(bench, folder.path, body)
