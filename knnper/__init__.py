"""A distributed personalised federated learning system on Flower.

The rooms `server`, `client`, `strategies`, `datastore` and `simulation` are folders at
the top of the repository; links beside this file make them `knnper.server` and so on.
"""

from pathlib import Path

__version__ = "0.1.0"

# Flower's app bundle leaves links out: there the rooms are found beside this folder.
if not (Path(__file__).parent / "server").exists():
    __path__.append(str(Path(__file__).parents[1]))
