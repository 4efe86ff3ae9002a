"""Predictions of a run for each test example: one Parquet file."""

import hashlib
import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnper.files import write_atomically, written_atomically
from knnper.process import import_extra

FILE = "predictions.parquet"


def require_arrow() -> None:
    """Raise an error at the start of a run if Parquet files could not be written."""
    _arrow("parquet")


@dataclass(frozen=True)
class RunPredictions:
    """The predictions of a run in its folder: a part per client, finally one file.

    A killed run rewrites a client's part as a whole, so that no row is lost or doubled.
    """

    folder: Path
    split: str = "test"  # the split that clients are tested on

    def write(
        self,
        client: str,
        seen: bool,
        examples: Sequence[str] | NDArray[np.int64],
        labels: Tensor,
        personal: Tensor,
        reference: Tensor,
    ) -> None:
        """Write a client's part; on return it is on disk.

        ``examples``: Names, or indices. ``labels``: int64 (n,). ``personal``,
        ``reference``: Probabilities of its own and of the unpersonalised model, float32
        (n, c).
        """
        arrow, count = _arrow("lib"), len(labels)
        is_index = isinstance(examples, np.ndarray)
        arrays = {"personal": personal.numpy(), "global": reference.numpy()}
        table = arrow.table(
            {
                "client": arrow.array([client] * count, arrow.string()),
                "seen": arrow.array([seen] * count, arrow.bool_()),
                "example": arrow.array(
                    examples, arrow.int64() if is_index else arrow.string()
                ),
                "split": arrow.array([self.split] * count, arrow.string()),
                "label": arrow.array(labels.numpy(), arrow.int64()),
                **{
                    f"probabilities_{name}": arrow.ListArray.from_arrays(
                        np.arange(len(probabilities) + 1, dtype=np.int32)
                        * probabilities.shape[1],
                        probabilities.astype(np.float32).ravel(),
                    )
                    for name, probabilities in arrays.items()
                },
            }
        )
        content = arrow.BufferOutputStream()
        _arrow("parquet").write_table(table, content)
        part = self._part(client)
        part.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(part, content.getvalue().to_pybytes())

    def has(self, client: str) -> bool:
        """Return whether a client's part exists; `forget_parts` removes it."""
        return self._part(client).exists()

    def merge(self, titles: Mapping[str, str]) -> None:
        """Join the clients' parts to one file, sorted by the clients' titles.

        ``titles``: title by name of each client; it replaces the name in the file.
        """
        parquet = _arrow("parquet")
        ordered = sorted(titles, key=lambda client: titles[client])
        parts = (self._titled(client, titles[client]) for client in ordered)
        first = next(parts)
        with (
            written_atomically(self.folder / FILE) as file,
            parquet.ParquetWriter(file, first.schema) as writer,
        ):
            for table in itertools.chain([first], parts):
                writer.write_table(table)

    def forget_parts(self) -> None:
        """Remove the parts, which `merge` has copied."""
        shutil.rmtree(self._part("").parent, ignore_errors=True)

    def _titled(self, client: str, title: str) -> Any:
        table = _arrow("parquet").read_table(self._part(client))
        names = _arrow("lib").array([title] * len(table), table.schema.types[0])
        return table.set_column(0, table.schema.field(0), names)

    def _part(self, client: str) -> Path:
        # A client's name may not be valid as a file name.
        name = hashlib.sha256(client.encode()).hexdigest()[:32]
        return self.folder / "predictions" / f"{name}.parquet"


def _arrow(module: str) -> Any:
    return import_extra(f"pyarrow.{module}", "tables", "run.save_predictions")
