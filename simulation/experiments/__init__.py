"""The experiments that are shipped, found by name: ``demo`` is ``demo.yaml`` here."""

from collections.abc import Mapping
from pathlib import Path

from knnper.errors import ConfigError, Problem

_IN_A_FOLDER = ("experiment.yaml", "comparison.yaml")  # that `knnper init` makes


def shipped_experiments() -> Mapping[str, Path]:
    """Return the files of experiments, sweeps and comparisons by name, sorted."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def find_experiment(place: str | Path) -> Path:
    """Return the file that is meant: of a path, of a folder with one, or shipped.

    Raises
    ------
    ConfigError
        If a name, which no path would be, is not that of anything that is shipped.
    """
    path = Path(place)
    shipped = shipped_experiments()
    for name in _IN_A_FOLDER:
        if (path / name).is_file():
            return path / name
    if path.is_file() or path.suffix or path.name != str(place):
        return path
    if path.name not in shipped:
        # It loads NumPy, which `knnper --help` need not wait for.
        from knnper.settings import alternatives

        known = alternatives(path.name, shipped)
        message = f"found neither a file nor an experiment that is shipped; {known}"
        raise ConfigError([Problem(path.name, message)])
    return shipped[path.name]
