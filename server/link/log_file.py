"""A log that other processes write, kept small while they do."""

import shutil
from dataclasses import dataclass
from pathlib import Path

WARNINGS_VARIABLE = "KNNPER_WARNINGS"
"""Environment variable with the file to which runs write what the server's own log has
to say too: Flower keeps their logs in its database."""


@dataclass(frozen=True)
class LogFile:
    """The log and its earlier parts: ``NAME.1`` is the latest of them.

    Attributes
    ----------
    path
        What is written to, always at its end.
    largest
        Bytes after which it is put aside.
    num_kept
        Number of earlier parts that are kept.
    """

    path: Path
    largest: int = 10_000_000
    num_kept: int = 3

    def put_aside(self) -> None:
        """Begin anew if the log is too large.

        The writers keep the file open, and so it is copied and emptied; lines that
        come between the two are lost.
        """
        if not self.path.exists() or self.path.stat().st_size <= self.largest:
            return
        for number in range(self.num_kept, 1, -1):
            if self._part(number - 1).exists():
                self._part(number - 1).replace(self._part(number))
        shutil.copyfile(self.path, self._part(1))
        with self.path.open("r+b") as file:
            file.truncate()

    def read_from(self, position: int) -> tuple[list[str], int]:
        """Return the whole lines after a position, and the position behind them."""
        if not self.path.exists():
            return [], 0
        with self.path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(position if position <= size else 0)
            begin = file.tell()
            text, end, _ = file.read().rpartition(b"\n")
        lines = text.decode(errors="replace").split("\n") if end else []
        return lines, begin + len(text) + len(end)

    def _part(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
