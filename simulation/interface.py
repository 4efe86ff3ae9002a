"""Simulations from Python: start a run, resume it, and read its results."""

import contextlib
import copy
import functools
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from pydantic_core import to_jsonable_python
from torch import Tensor, nn

from knnper.data.examples import ClientData, Examples
from knnper.data.own_data import convert_inputs
from knnper.errors import KnnPerError, RunError, printable
from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment, read_experiment, to_document
from knnper.predictions import FILE, require_arrow
from knnper.process import import_extra, with_fixed_threads
from knnper.server.observer import Observer, progress_observer
from knnper.server.run_folder import RunFolder
from knnper.settings import nearest
from knnper.simulation import engines
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.continuation import begin_continuation
from knnper.simulation.experiments import find_experiment
from knnper.simulation.origin import inputs_of, keep_inputs, sign
from knnper.simulation.partition.split import MOST_DRAWN
from knnper.simulation.reports.finished_run import GROUPS, load_run
from knnper.simulation.trained_model import client_predictor, ended_run, find_model
from knnper.simulation.workbench import Workbench, open_workbench
from knnper.strategies.catalogue import without_start
from knnper.strategies.core.exported_model import GlobalModel
from knnper.strategies.core.predictors import Predictor

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_COMMAND = ("knnper.simulate",)  # the command in a run's manifest


def simulate(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **overrides: Any,
) -> "Run":
    """Train, personalise and evaluate virtual clients; return the finished run.

    Parameters
    ----------
    experiment
        The path of a YAML file, the name of a shipped experiment such as ``demo``, its
        content as a mapping, or an `Experiment`.
    output
        The run's folder; by default ``runs/NAME``.
    overwrite
        Whether a run in the folder is deleted first.
    progress
        Whether to draw progress bars, or to write lines without a terminal.
    overrides
        Settings that replace those of the experiment, with two underscores for a dot,
        as in ``training__num_rounds=5``; a mapping replaces a whole section.

    Raises
    ------
    ConfigError
        If the experiment is invalid, with all problems.
    DataError
        If the data is missing or invalid.
    FolderTakenError
        If the folder is not empty.
    RunError
        If the run fails. Its rounds are kept, see `Run.resume`.
    """
    with _threads_kept():
        changes = as_changes(overrides)
        bench, folder = begin(experiment, changes, output, overwrite=overwrite)
        with _observed(progress=progress) as observer:
            engines.simulate(bench, folder, observer, _COMMAND)
    return Run(folder.path)


class Run:
    """The folder of a run, finished or not.

    Parameters
    ----------
    path
        As given to ``output``.

    Raises
    ------
    RunError
        If the folder holds no run.
    """

    def __init__(self, path: str | Path) -> None:
        self._folder = RunFolder.open(Path(path))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}: {self._state()}>"

    def _repr_html_(self) -> str:
        """Return the run's verdict and tables for a notebook."""
        name = html.escape(repr(self))
        if not self.is_finished:
            return f"<p>{name}</p><p><code>.resume()</code> continues.</p>"
        try:
            import_extra("matplotlib", "report", "a run's tables in a notebook")
            from knnper.simulation.reports.pages import as_notebook_html

            return as_notebook_html(self.path)
        except KnnPerError as error:
            return f"<p>{name}</p><p>{html.escape(str(error))}</p>"

    def _state(self) -> str:
        """Describe progress and results in a few words."""
        try:
            if not self.is_finished:
                done = len(self._folder.rounds())
                total = self.experiment.training.num_rounds
                return f"not finished, {done} of {total} rounds"
            run = load_run(self.path)
        except KnnPerError as error:
            return f"damaged: {printable(str(error))}"
        averages = {
            group: run.results[group].get("accuracy_weighted") for group in GROUPS
        }
        shares = [
            f"{100 * accuracy:.1f} % of the {group} clients' examples"
            for group, accuracy in averages.items()
            if accuracy is not None
        ]
        if not shares:
            return run.title
        return f"{run.title}, right for {' and '.join(shares)}"

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._folder.path

    @property
    def experiment(self) -> Experiment:
        """All its settings."""
        return self._folder.experiment(experiment_catalogue())

    @property
    def is_finished(self) -> bool:
        """Whether it has results."""
        return self._folder.is_finished()

    @property
    def results(self) -> dict[str, Any]:
        """The content of ``results.json``."""
        return self._folder.results()

    @property
    def clients(self) -> pd.DataFrame:
        """The content of ``clients.csv``, a row a client, by name."""
        if not self.is_finished:
            raise RunError(
                f"the run in {self.path} is not done; continue it with resume()"
            )
        names = {"client": str}
        table = pd.read_csv(self.path / "clients.csv", converters=names)
        return table.set_index("client")

    @property
    def rounds(self) -> pd.DataFrame:
        """The figures of the rounds so far, a row a round."""
        rounds = pd.DataFrame(self._folder.rounds())
        return rounds if rounds.empty else rounds.set_index("server_round")

    @property
    def predictions(self) -> pd.DataFrame:
        """The content of ``predictions.parquet``, a row a test example."""
        path = self.path / FILE
        if not path.exists():
            raise RunError(
                f"{path} is missing, expected a finished run with "
                "run.save_predictions=true; simulate it again with that"
            )
        require_arrow()
        return pd.read_parquet(path)

    def resume(self, *, progress: bool = True, **overrides: Any) -> "Run":
        """Resume an interrupted run; return it when it is finished.

        ``overrides`` are settings that change no result, such as ``run__num_workers``.
        """
        with _threads_kept():
            bench, folder = reopen(self.path, as_changes(overrides))
            with _observed(progress=progress) as observer:
                engines.simulate(bench, folder, observer, _COMMAND)
        return self

    def continued(
        self,
        num_rounds: int,
        output: str | Path,
        *,
        overwrite: bool = False,
        progress: bool = True,
        **overrides: Any,
    ) -> "Run":
        """Continue this finished run in a new folder; return the new run.

        It ends with the same bits as a run of ``num_rounds`` from the start. This run's
        folder does not change.

        Parameters
        ----------
        num_rounds
            The total number of rounds, more than this run has.
        output
            The new run's folder.
        overwrite, progress
            As in `simulate`.
        overrides
            Settings that change no result, such as ``run__num_workers``.

        Raises
        ------
        ConfigError
            If the method cannot make more rounds, or the settings change its results.
        RunError
            If this run is not done, or its data, code or last state has changed.
        """
        changes = [f"training.num_rounds={num_rounds}", *as_changes(overrides)]
        with _threads_kept():
            bench, folder = begin_continuation(
                self.path, changes, Path(output), overwrite=overwrite
            )
            with _observed(progress=progress) as observer:
                engines.simulate(bench, folder, observer, _COMMAND)
        return Run(folder.path)

    def model(self) -> nn.Module:
        """Return the trained global model, in evaluation mode, on the CPU.

        It takes what `preprocess` returns, and returns logits (n, c). With its methods
        ``embed`` and ``head`` it is a model for `LocalMemory`.

        Raises
        ------
        RunError
            If the method does not end with one model for all clients.
        """
        model = self._global_model
        model.task.model.load(model.weights)
        return copy.deepcopy(model.task.model.module).eval()

    def inputs(self, rows: "ArrayLike | pd.DataFrame") -> Tensor:
        """Convert your own inputs to the form that `data` and `test` return.

        `predictor` and `preprocess` take them.

        Parameters
        ----------
        rows
            A table or an array of n rows of features, or n images of the run's size,
            uint8. If the run's data names its features, a table's columns are found by
            these names, in any order and beside others; otherwise by position.

        Raises
        ------
        DataError
            If a feature is missing or not a number, or the shape is wrong.
        """
        return convert_inputs(rows, self._bench.dataset)

    def preprocess(self, inputs: Tensor) -> Tensor:
        """Convert inputs of data sets to inputs of the model.

        From uint8 images (n, height, width, channels), which `data` and `test` return,
        to normalised images, float32 (n, channels, height, width). `inputs` converts
        your own rows and images to the first form.
        """
        return self._global_model.task.normalize(inputs)

    def predictor(self, client: str) -> Predictor:
        """Return a client's predictor: from inputs to probabilities (n, c).

        It is personalised from the last global model, as in the run. It takes inputs as
        `data`, `test` and `inputs` return them. The predictor of a `LocalMemory` also
        has ``explain``.

        Parameters
        ----------
        client
            Its name in `clients`, as for `data` and `test`.

        Raises
        ------
        RunError
            If the client is unknown, or the run is not done.
        """
        with _threads_kept():
            ended = replace(ended_run(self.path), bench=self._bench)
            name = _name_of(client, self._bench, self.path)
            return client_predictor(ended, name)

    def data(self, client: str) -> ClientData:
        """Return a client's training and validation splits."""
        name = _name_of(client, self._bench, self.path)
        return self._bench.clients.data(name)

    def test(self, client: str) -> Examples:
        """Return the test split of a client."""
        name = _name_of(client, self._bench, self.path)
        return self._bench.clients.test(name)

    @functools.cached_property
    def _global_model(self) -> GlobalModel:
        with _threads_kept():
            return find_model(self.path)

    @functools.cached_property
    def _bench(self) -> Workbench:
        """The run's workbench; its clients have inputs, not embeddings."""
        with _threads_kept():
            experiment = without_start(self.experiment)
            return open_workbench(experiment, as_embeddings=False)


def begin(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    changes: Sequence[str] = (),
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
) -> tuple[Workbench, RunFolder]:
    """Open an experiment, with ``KEY=VALUE`` changes, and create its run's folder."""
    catalogue = experiment_catalogue()
    if isinstance(experiment, Experiment):
        experiment = to_document(experiment)
    if isinstance(experiment, Mapping):
        # Users' code is then looked for in the working folder.
        settings = load_experiment(experiment, catalogue, changes, folder=Path.cwd())
    else:
        settings = read_experiment(find_experiment(experiment), catalogue, changes)
    settings = with_fixed_threads(settings)
    place = Path(output) if output is not None else Path("runs") / settings.name
    RunFolder.require_free(place, overwrite=overwrite)
    # Problems of data or model are raised before an earlier run is deleted.
    bench = open_workbench(settings)
    inputs = inputs_of(settings)
    folder = RunFolder.create(place, bench.experiment, overwrite=overwrite)
    sign(folder.path)
    keep_inputs(folder.path, inputs)
    return bench, folder


def reopen(path: Path, changes: Sequence[str] = ()) -> tuple[Workbench, RunFolder]:
    """Open the experiment of a run; the changes must not change results."""
    folder = RunFolder.open(path)
    settings = folder.experiment(experiment_catalogue(), changes)
    return open_workbench(settings), folder


def as_changes(overrides: Mapping[str, Any]) -> list[str]:
    """Return ``KEY=VALUE`` of settings; ``__`` in their names stands for a dot."""
    return [
        f"{name.replace('__', '.')}={json.dumps(to_jsonable_python(value))}"
        for name, value in overrides.items()
    ]


@contextlib.contextmanager
def _observed(*, progress: bool) -> Iterator[Observer]:
    if progress:
        with progress_observer() as observer:
            yield observer
    else:
        yield Observer()


@contextlib.contextmanager
def _threads_kept() -> Iterator[None]:
    """Restore torch's number of threads, which a run sets for its results."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _name_of(client: str, bench: Workbench, run: Path) -> str:
    """Return a client's internal name from its title; see `ClientPart.title`."""
    clients = bench.partition.clients
    names = dict(zip(clients.titles or clients.names, clients.names, strict=True))
    if client not in names:
        shown = [*names][:MOST_DRAWN]
        guess = nearest(str(client), shown) or f"the first is {shown[0]!r}"
        raise RunError(
            f"the run in {run} has no client {client!r}, expected one of the "
            f"{len(names)} that Run.clients lists; {guess}"
        )
    return names[client]
