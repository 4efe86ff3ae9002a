"""``knnper export``: a run's global model as a folder that needs nothing else."""

from pathlib import Path
from typing import Annotated

import typer

from knnper.cli.output import say


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to; a new folder.")
    ],
) -> None:
    """Write a finished run's global model to a folder, for sites that join later."""
    # Everything below loads torch, which `knnper --help` need not wait for.
    from knnper.transport.model_folder.files import save_model
    from simulation.trained_model import find_model

    model = find_model(run)
    save_model(folder, model)
    say(
        f"{folder} holds the model {model.fingerprint[:12]} of {run}; a site that "
        f"joins runs: knnper onboard --config client.yaml --model {folder}"
    )
