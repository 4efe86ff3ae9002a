"""The files of one figure of the memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulation.figures.curves import Curve, curve_rows
from simulation.figures.folder import FigureFolder, PartRecord
from simulation.figures.memory.panel import Panel, Records
from simulation.figures.memory.picture import picture
from simulation.figures.memory.settings import MemorySettings

_FACTS = ("num_test", "mean_size", "global_accuracy")


@dataclass(frozen=True)
class PanelCurves:
    """The numbers of one figure of the memory.

    Attributes
    ----------
    curves
        Its lines.
    global_accuracy
        What the global model does without any memory.
    """

    curves: Sequence[Curve]
    global_accuracy: float


def write_panel(
    folder: FigureFolder,
    identity: Mapping[str, Any],
    panel: Panel,
    settings: MemorySettings,
    measured: Sequence[PartRecord],
) -> PanelCurves:
    """Write .csv, .png, .svg, .pdf and .json of a figure; return its curves.

    Parameters
    ----------
    folder
        Where to.
    identity
        What the numbers depend on; see `simulation.figures.folder.identity_of`.
    panel
        The figure.
    settings
        Which points it shows.
    measured
        The record of each of its deals.
    """
    by_alpha = _by_alpha(measured)
    curves = panel.curves(by_alpha, settings)
    header = (panel.line_name, panel.x_name, panel.y_name, f"{panel.y_name}_std")
    rows = curve_rows(curves)
    folder.write_csv(f"{panel.name}.csv", (*header, *curves[0].details), rows)
    global_accuracy = measured[0]["global_accuracy"]
    folder.write_pictures(panel.name, picture(panel, curves, global_accuracy))
    details = {
        "title": panel.title,
        **{name: measured[0][name] for name in _FACTS},
        "correlations": panel.correlations(by_alpha, settings),
        "curves": [curve.as_record() for curve in curves],
    }
    described = {**identity, "figure": panel.name}
    folder.write_description(described, measured, details)
    return PanelCurves(curves, global_accuracy)


def _by_alpha(measured: Sequence[PartRecord]) -> Records:
    found: dict[float, list[PartRecord]] = {}
    for record in measured:
        found.setdefault(record["alpha"], []).append(record)
    return found
