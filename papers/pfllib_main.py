"""Run PFLlib's ``main.py`` from given weights, with PFLlib's own Python.

Imports nothing of this project, which that Python may lack.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch


def main(system: str, initial: str, report: str, *arguments: str) -> None:
    """Run ``main.py`` in the folder ``system``; record accuracies and seconds."""
    sys.path.insert(0, system)
    from flcore.servers.serverbase import Server  # type: ignore[import-not-found]
    from flcore.trainmodel.models import FedAvgCNN  # type: ignore[import-not-found]

    with np.load(initial) as file:
        weights = [torch.from_numpy(file[name]) for name in file.files]
    make, choose, save = (
        FedAvgCNN.__init__,
        Server.select_clients,
        Server.save_results,
    )

    def make_with_weights(self: Any, *values: Any, **named: Any) -> None:
        make(self, *values, **named)
        for parameter, initial in zip(self.parameters(), weights, strict=True):
            parameter.data.copy_(initial)

    def keep(self: Any) -> None:
        figures = {
            "every": self.eval_gap,
            "test": self.rs_test_acc,
            "seconds": self.Budget,
        }
        Path(report).write_text(json.dumps(figures), encoding="utf-8")

    def choose_after_keeping(self: Any) -> Any:
        keep(self)  # so that an interrupted run leaves its results
        return choose(self)

    def keep_and_save(self: Any) -> None:
        keep(self)
        save(self)

    FedAvgCNN.__init__ = make_with_weights
    Server.select_clients = choose_after_keeping
    Server.save_results = keep_and_save
    sys.argv = ["main.py", *arguments]
    runpy.run_path(f"{system}/main.py", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
