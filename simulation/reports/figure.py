"""Curves over several deals of the data: means, with what they vary by."""

import contextlib
import csv
import dataclasses
import functools
import io
import json
import logging
import re
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

from cycler import cycler
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import PercentFormatter
from pydantic import Field
from pydantic_core import to_jsonable_python

from knnper.errors import FolderTakenError
from knnper.experiment import (
    Experiment,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Settings,
    UnitInterval,
)
from knnper.files import JsonLines, write_atomically
from knnper.server.run_folder import LOCK, RunFolder
from knnper.simulation.batches.folder import (
    code_fingerprint,
    content_digest,
    inputs_of,
    split_of,
)
from knnper.simulation.trained_model import TrainedModel

_MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Curve:
    """One line of a figure.

    Attributes
    ----------
    label
        What it is of.
    x
        Places on the horizontal axis.
    mean
        At each of them, over the deals.
    std
        Standard deviation of a sample, over the deals; None of fewer than two.
    details
        More figures for the table, by name, each with a value at each place.
    """

    label: str
    x: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float | None, ...]
    details: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def as_record(self) -> Mapping[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)


def curve_over(
    label: str,
    x: Sequence[float],
    deals: Sequence[Sequence[float]],
    details: Mapping[str, Sequence[float]] | None = None,
) -> Curve:
    """Return the curve of values (deals, x)."""
    at_each = list(zip(*deals, strict=True))
    return Curve(
        label,
        tuple(x),
        tuple(statistics.fmean(values) for values in at_each),
        tuple(
            statistics.stdev(values) if len(values) > 1 else None for values in at_each
        ),
        details or {},
    )


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None where one of the two does not vary."""
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return statistics.correlation(x, y)


def curve_rows(curves: Sequence[Curve]) -> Iterator[tuple[object, ...]]:
    """Yield label, place, mean, standard deviation and details of each point."""
    for curve in curves:
        for at, place in enumerate(curve.x):
            more = (values[at] for values in curve.details.values())
            yield curve.label, place, curve.mean[at], curve.std[at], *more


def plot_curves(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw each curve with bars of one standard deviation to both sides."""
    for number, curve in enumerate(curves):
        axes.errorbar(
            curve.x,
            curve.mean,
            yerr=[std or 0.0 for std in curve.std],
            fmt=f"{_MARKERS[number % len(_MARKERS)]}-",
            markersize=4,
            capsize=2,
            linewidth=1.2,
            label=curve.label,
        )


FALLBACKS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Arial Unicode MS",
)
"""Have Chinese, Japanese or Korean characters, which the first font lacks."""

_LOG = logging.getLogger(__name__)

_MISSING = re.compile(r"Glyph (\d+) .*missing from")

_TOLD: set[str] = set()
"""Characters that need not be told again."""


def font_families() -> list[str]:
    """Return the usual fonts, and those to turn to where these lack a character."""
    return [
        *rcParams["font.family"],
        *installed_fallbacks(fontManager.get_font_names()),
    ]


def installed_fallbacks(names: Collection[str]) -> list[str]:
    """Return which of `FALLBACKS` are among the names of fonts, in their order.

    matplotlib warns of every font that is asked for and not there.
    """
    return [name for name in FALLBACKS if name in names]


@contextlib.contextmanager
def boxes_told() -> Iterator[None]:
    """Log once which characters no font has, inside the block or when decorating.

    matplotlib draws a box for each and warns whenever one is laid out.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", _MISSING.pattern, UserWarning)
        yield
    missing = set[str]()
    for one in caught:
        if found := _MISSING.match(str(one.message)):
            missing.add(chr(int(found[1])))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    if new := missing - _TOLD:
        _TOLD.update(new)
        _LOG.warning(
            "no font of this machine has the characters %s: charts show boxes in their "
            "place. Install one that has them, such as Noto Sans CJK for Chinese, "
            "Japanese and Korean, and draw again",
            " ".join(sorted(new)),
        )


PartRecord = Mapping[str, Any]

OnPart = Callable[[int, int], None]
"""``(done, total) -> None``: is told how many parts are finished."""

_PARTS = "parts.jsonl"

_DOTS_PER_INCH = 150

_DATASET, _INITIAL_WEIGHTS, _SPLIT = "dataset", "initial_weights", "split"

_INPUTS = (_DATASET, _INITIAL_WEIGHTS, _SPLIT)
"""What the first line of an old folder does not say."""


def identity_of(
    name: str, model: TrainedModel, settings: Settings, seed: int
) -> Mapping[str, Any]:
    """Return all that the numbers of a figure depend on, as plain values."""
    return {
        "figure": name,
        "model": model.fingerprint,
        _DATASET: content_digest(model.dataset),
        "seed": seed,
        "settings": to_jsonable_python(settings),
    }


def identity_of_inputs(experiment: Experiment) -> Mapping[str, Any]:
    """Return what a figure that is trained from an experiment depends on beside it.

    Raises
    ------
    DataError
        If the data cannot be loaded or dealt.
    RunError
        If the file of weights cannot be read.
    """
    inputs = inputs_of(experiment)
    return {
        _DATASET: inputs.data,
        _INITIAL_WEIGHTS: inputs.weights,
        _SPLIT: split_of(experiment),
    }


@dataclass(frozen=True)
class FigureFolder:
    """A figure's folder; made by `open`.

    Attributes
    ----------
    path
        The folder.
    """

    path: Path

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, identity: Mapping[str, Any]) -> Iterator["FigureFolder"]:
        """Yield the folder of a figure, new or begun before, to this process alone.

        Parameters
        ----------
        path
            The folder; parents are created as needed.
        identity
            All that the numbers depend on, as plain values.

        Raises
        ------
        FolderTakenError
            If the folder holds something else, or a figure with other settings.
        RunError
            If another process is at work in it.
        """
        if path.exists() and not path.is_dir():
            raise FolderTakenError(
                f"{path} is a file; expected a folder for the figure"
            )
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        folder._require_own()
        with RunFolder(path).locked():
            folder._require_same(json.loads(json.dumps(identity)))
            yield folder

    def finish(
        self,
        names: Sequence[str],
        make: Callable[[str], PartRecord],
        on_part: OnPart,
    ) -> list[PartRecord]:
        """Return the record of each part, making those that are not there yet.

        Parameters
        ----------
        names
            Of the parts; the records come in this order.
        make
            Returns the record of a part, plain values.
        on_part
            Is told at the beginning, and after each part.
        """
        done = {record["part"]: record for record in self._part_records()}
        num_done = sum(name in done for name in names)
        on_part(num_done, len(names))
        for name in names:
            if name in done:
                continue
            began = time.monotonic()
            record = dict(make(name))
            seconds = time.monotonic() - began
            made = {"part": name, "seconds": seconds, "code": code_fingerprint()}
            done[name] = {**made, **record}
            self._lines.append(done[name])
            num_done += 1
            on_part(num_done, len(names))
        return [done[name] for name in names]

    def older_code(self) -> Iterator[str]:
        """Yield what to tell of parts that other code made."""
        others = [record.get("code") for record in self._part_records()]
        if older := sum(code != code_fingerprint() for code in others):
            yield (
                f"{older} of the {len(others)} parts of the figure in {self.path} were "
                "made by another version of this code; to have all from this one, "
                "delete the folder and start again"
            )

    def write_description(
        self,
        identity: Mapping[str, Any],
        records: Sequence[PartRecord],
        details: Mapping[str, Any],
    ) -> None:
        """Write how the figure was made to a file of its name.

        Parameters
        ----------
        identity
            As of `identity_of`.
        records
            Of all parts; their seconds are summed up.
        details
            What else there is to say, as plain values.
        """
        seconds = round(sum(record["seconds"] for record in records), 1)
        document = {**identity, **details, "seconds": seconds}
        text = json.dumps(document, indent=2) + "\n"
        write_atomically(self.path / f"{identity['figure']}.json", text)

    def write_csv(
        self, name: str, header: Sequence[str], rows: Iterable[Sequence[object]]
    ) -> None:
        """Write a table to ``name``; None becomes an empty cell."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
        write_atomically(self.path / name, text.getvalue())

    @boxes_told()
    def write_pictures(self, name: str, figure: Figure) -> None:
        """Write ``name``.png, ``name``.svg and ``name``.pdf."""
        # Without a date and with named parts, the same figure is the same file.
        with rc_context({"svg.hashsalt": name}):
            figure.savefig(self.path / f"{name}.svg", metadata={"Date": None})
        figure.savefig(self.path / f"{name}.pdf", metadata={"CreationDate": None})
        figure.savefig(self.path / f"{name}.png", dpi=_DOTS_PER_INCH)

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.path / _PARTS)

    def _part_records(self) -> list[PartRecord]:
        return [record for record in self._lines.read() if "part" in record]

    def _require_own(self) -> None:
        """Refuse a folder that is somebody else's, before anything is written there."""
        others = (path for path in self.path.iterdir() if path.name != LOCK)
        if not self._lines.read() and any(path.name != _PARTS for path in others):
            raise FolderTakenError(
                f"{self.path} is not empty and holds no figure; choose another "
                "folder with --output"
            )

    def _require_same(self, identity: Mapping[str, Any]) -> None:
        lines = self._lines.read()
        if not lines:
            self._lines.append(identity)
            return
        before = {**{name: identity.get(name) for name in _INPUTS}, **lines[0]}
        names = sorted(identity.keys() | before.keys())
        other = [name for name in names if identity.get(name) != before.get(name)]
        if other:
            raise FolderTakenError(
                f"{self.path} holds a figure with another {', '.join(other)}; give the "
                "same again, delete the folder to make it anew, or choose another one "
                "with --output"
            )


PanelName = Literal[
    "capacity", "knn-weight", "neighbors", "kernel-scale", "best-weight", "hardware"
]
"""One of the figures of the memory."""

SampleCount = Annotated[int, Field(ge=3)]


@dataclass(frozen=True)
class MemoryOptions(Settings):
    """Of the figures of the memory: knn-per.txt, Figures 1, 2, 5, 7, 8 and 9.

    Attributes
    ----------
    only
        Which of them.
    clients
        M, the new clients; null is as many as the run's unseen ones.
    alpha
        α of the lines of ``capacity``.
    size
        A client's images, on average, in ``knn-weight``; none is 1/50, 1/10, 2/5 and
        all of those it has.
    deals
        How often the images are dealt anew.
    seed
        Fixes every random choice.
    """

    only: Annotated[tuple[PanelName, ...], Field(min_length=1)] = (
        "capacity",
        "knn-weight",
        "neighbors",
        "kernel-scale",
        "best-weight",
        "hardware",
    )
    clients: PositiveInt | None = None
    alpha: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (
        0.1,
        0.3,
        0.5,
        0.7,
        1.0,
    )
    size: tuple[PositiveInt, ...] = ()
    deals: PositiveInt = 3
    seed: NonNegativeInt = 0


@dataclass(frozen=True)
class QualityOptions(Settings):
    """Of the figure of the model's quality: knn-per.txt, Figures 3, 12 and 13.

    Attributes
    ----------
    epochs
        Passes over the central data after which the model is kept.
    clients
        M, the new clients; null is as many as the unseen ones.
    alpha
        α of each line.
    deals
        How often the images are dealt anew.
    """

    epochs: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] = (
        0.0,
        0.1,
        0.3,
        1.0,
        3.0,
        10.0,
        30.0,
    )
    clients: PositiveInt | None = None
    alpha: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (0.1, 0.3, 1.0)
    deals: PositiveInt = 3


@dataclass(frozen=True)
class DriftOptions(Settings):
    """Of the figure of a shift: knn-per.txt, Figure 14.

    Attributes
    ----------
    clients
        M.
    steps
        T, batches that arrive.
    shift_at
        t0, the batches before the shift; fewer than ``steps``.
    alpha
        Of both Dirichlet draws.
    knn_weight
        λ of all clients; null lets each choose once.
    seed
        Fixes every random choice.
    """

    clients: PositiveInt = 100
    steps: Annotated[int, Field(ge=2)] = 100
    shift_at: PositiveInt = 50
    alpha: PositiveFloat = 0.3
    knn_weight: UnitInterval | None = None
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.shift_at >= self.steps:
            raise ValueError(
                f"found shift_at {self.shift_at} with steps {self.steps}, expected "
                "shift_at below steps"
            )


@dataclass(frozen=True)
class ProtoNNOptions(Settings):
    """Of the figure of ProtoNN: knn-per.txt, Figure 11.

    Attributes
    ----------
    clients
        The first so many of the run's clients; null is 50, or all with ``full``.
    capacity
        Prototypes by a client's examples; none is 0.1, 0.3, 0.6 and 1, or 0.1, 0.2 ...
        1 with ``full``.
    dim
        Projection dimensions; none is 4 of them up to that of the embeddings, or 13
        with ``full``.
    full
        All clients and the paper's whole grid.
    steps
        Steps of training; null is the default of ProtoNN's own settings.
    seed
        Fixes every random choice.
    """

    clients: PositiveInt | None = None
    capacity: tuple[PositiveFraction, ...] = ()
    dim: tuple[PositiveInt, ...] = ()
    full: bool = False
    steps: NonNegativeInt | None = None
    seed: NonNegativeInt = 0


@dataclass(frozen=True)
class CollapseOptions(Settings):
    """Of the figure of FedBasis' collapse, whose experiment says everything."""


@dataclass(frozen=True)
class ThreeApproachesOptions(Settings):
    """Of the figure of three approaches on synthetic users.

    Attributes
    ----------
    samples
        Of each user.
    clusters
        Of HypCluster.
    users
        p.
    seed
        Fixes every random choice.
    """

    samples: Annotated[tuple[SampleCount, ...], Field(min_length=1)] = (
        3,
        5,
        10,
        30,
        100,
        200,
    )
    clusters: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (
        1,
        2,
        3,
        4,
        5,
        6,
        8,
    )
    users: PositiveInt = 100
    seed: NonNegativeInt = 0


@dataclass(frozen=True)
class Color:
    """One colour in two shades of nearly the same hue.

    Attributes
    ----------
    light, dark
        ``#rrggbb``, at a contrast of 3 to 1 at least to a white and a black ground.
    """

    light: str
    dark: str


INK = Color("#1d2430", "#e9ecf1")
"""Text."""

SOFT = Color("#5a6372", "#a3acba")
"""Axes, and what is only compared with: the unpersonalised model, the diagonal."""

FAINT = Color("#dcdfe4", "#343b46")
"""Grids."""

SERIES = (
    Color("#0072b2", "#5db4ee"),
    Color("#c44e00", "#ff9350"),
    Color("#00805c", "#35cfa2"),
    Color("#a3478b", "#e791cc"),
    Color("#8f6b00", "#e3bf45"),
    Color("#5b50c4", "#a9a1ff"),
    Color("#7a3e1d", "#d29a78"),
    Color("#3d7f8f", "#7fd0e2"),
)
"""After Okabe and Ito, "Color universal design", 2008, darkened for thin lines."""

_OF_METHOD = {"kNN-Per": 0, "FedAvg": 1, "FedAvg+": 2, "Local": 3}


def colors_of(titles: Iterable[str]) -> list[Color]:
    """Return a colour for each title; the same method has the same one everywhere.

    Methods without a colour of their own, and a title that comes again, have those that
    are left, in their order. As many titles as there are colours share none.
    """
    titles = list(titles)
    own = {
        titles.index(title): place
        for title, place in _OF_METHOD.items()
        if title in titles
    }
    first = range(min(len(titles), len(SERIES)))
    taken = {own[number] for number in first if number in own}
    left = iter(place for place in range(len(SERIES)) if place not in taken)
    chosen = {number: next(left) for number in first if number not in own} | own
    return [
        SERIES[chosen.get(number, number % len(SERIES))]
        for number in range(len(titles))
    ]


P = ParamSpec("P")


@contextlib.contextmanager
def _figure_style() -> Iterator[None]:
    with rc_context(
        {
            "font.family": font_families(),
            "axes.prop_cycle": cycler(color=[color.light for color in SERIES]),
            "text.color": INK.light,
            "axes.labelcolor": INK.light,
            "axes.titlecolor": INK.light,
            "axes.edgecolor": SOFT.light,
            "xtick.color": SOFT.light,
            "ytick.color": SOFT.light,
            "xtick.labelcolor": INK.light,
            "ytick.labelcolor": INK.light,
            "legend.edgecolor": FAINT.light,
        }
    ):
        yield


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Return what draws the same in colours that a page can turn dark.

    The figure is laid out for good: it is the same wherever it is written.
    """

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _figure_style(), boxes_told():
            figure = draw(*args, **kwargs)
            # Ticks are made when they are needed, and take their colours then.
            figure.draw_without_rendering()
        figure.set_layout_engine("none")
        return figure

    return drawn


def accuracy_axis(axes: Axes, label: str = "test accuracy") -> None:
    """Make the vertical axis one of accuracies in percent, with a grid."""
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
    axes.grid(alpha=0.3)


if TYPE_CHECKING:
    # A server writes tables too, and has no matplotlib.
    from matplotlib.figure import Figure
