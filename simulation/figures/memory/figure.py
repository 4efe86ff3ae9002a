"""The figures of the memory: from the global model of a run to numbers and pictures."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from knnper.config.errors import RunError
from knnper.config.seeding import RandomKey
from knnper.config.suggestions import alternatives
from simulation.figures.curves import Curve
from simulation.figures.folder import FigureFolder, OnPart, PartRecord, identity_of
from simulation.figures.memory.panel import Deal, Panel
from simulation.figures.memory.panels import PANELS
from simulation.figures.memory.picture import picture
from simulation.figures.memory.settings import MemorySettings, memory_settings
from simulation.figures.memory.writing import PanelCurves, write_panel
from simulation.figures.newcomers import NewcomerPool
from simulation.figures.options import MemoryOptions
from simulation.figures.remembering import Rememberer
from simulation.showing import Chart, Shown, Table
from simulation.trained_model import TrainedModel

NAME = "memory"


def show_memory(
    model: TrainedModel, output: Path, options: MemoryOptions, on_part: OnPart
) -> Shown:
    """Make figures of the memory as `draw_memory` does; return what they show."""
    settings = memory_settings(model, options)
    found = draw_memory(model, output, settings, options.seed, options.only, on_part)
    return Shown(
        tuple(_table(PANELS[name], one.curves) for name, one in found.items()),
        tuple(_chart(PANELS[name], one) for name, one in found.items()),
    )


def _table(panel: Panel, curves: Sequence[Curve]) -> Table:
    return Table(
        panel.title,
        (panel.line_name, *(f"{place:g}" for place in curves[0].x)),
        tuple((one.label, *(f"{mean:.3f}" for mean in one.mean)) for one in curves),
    )


def _chart(panel: Panel, found: PanelCurves) -> Chart:
    draw = functools.partial(picture, panel, found.curves, found.global_accuracy)
    return Chart(panel.name, panel.title, draw)


def draw_memory(
    model: TrainedModel,
    output: Path,
    settings: MemorySettings,
    seed: int,
    names: Sequence[str],
    on_part: OnPart,
) -> Mapping[str, PanelCurves]:
    """Make figures in the folder ``output``; go on with them where they were left.

    Writes .csv, .png, .svg, .pdf and .json of each.

    Parameters
    ----------
    model
        The global model, of a run with clients that took no part in training.
    output
        The folder; others of these figures may be there.
    settings
        What is shown.
    seed
        Fixes every random choice.
    names
        Of `PANELS`.
    on_part
        Is told of every deal that is done.

    Returns
    -------
    Mapping
        The curves of each figure, by its name.

    Raises
    ------
    RunError
        If a name is unknown, there are no new clients or too few images for them, or
        the folder holds something else.
    """
    panels = [_panel(name) for name in dict.fromkeys(names)]
    pool = NewcomerPool(model)
    pool.require_clients(settings.num_clients)
    identity = identity_of(NAME, model, settings, seed)
    parts = {part.name: part for panel in panels for part in _parts(panel, settings)}
    dealer = _Dealer(pool, settings, RandomKey(seed).child(NAME))
    with FigureFolder.open(output, identity) as folder:
        records = folder.finish(
            list(parts), lambda name: dealer.measure(parts[name]), on_part
        )
        found = dict(zip(parts.values(), records, strict=True))
        return {
            panel.name: write_panel(
                folder,
                identity,
                panel,
                settings,
                [record for part, record in found.items() if part.panel is panel],
            )
            for panel in panels
        }


def _panel(name: str) -> Panel:
    if name not in PANELS:
        known = alternatives(name, PANELS)
        raise RunError(f"found no figure {name!r} of the memory; {known}")
    return PANELS[name]


@dataclass(frozen=True)
class _Part:
    """What one deal shows in one figure."""

    panel: Panel
    alpha: float
    number: int

    @property
    def name(self) -> str:
        return f"{self.panel.name}, alpha {self.alpha:g}, deal {self.number}"


def _parts(panel: Panel, settings: MemorySettings) -> Iterator[_Part]:
    for alpha in dict.fromkeys(panel.alphas(settings)):
        for number in range(1, settings.num_deals + 1):
            yield _Part(panel, alpha, number)


@dataclass(frozen=True, eq=False)
class _Dealer:
    """Deals the images of the unseen clients, and measures."""

    pool: NewcomerPool
    settings: MemorySettings
    key: RandomKey

    def measure(self, part: _Part) -> PartRecord:
        # All figures have the same deals, so that they can be compared.
        key = self.key.child("deal", part.number, f"{part.alpha:g}")
        clients = self.pool.deal(self.settings.num_clients, part.alpha, key)
        rememberer = Rememberer(
            self.pool.model.head, self.settings.knn, self.settings.validation_fraction
        )
        deal = Deal(clients, rememberer, self.settings)
        test = self.pool.test
        return {
            "alpha": part.alpha,
            "num_test": len(test),
            "mean_size": deal.mean_size,
            "global_accuracy": deal.accuracy(test.num_correct()),
            **part.panel.measure(deal),
        }
