"""Which clients have a run's model, and what they reported of it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from knnper.config.errors import RunError
from knnper.durable_files import JsonLines
from server.hand_over import Handed
from strategies.core.evaluation import ClientResult

_CLIENT_RESULT = TypeAdapter(ClientResult)


@dataclass(frozen=True)
class HandOverLog:
    """One line for each client that was handed a model.

    Attributes
    ----------
    path
        The file; it need not exist.
    """

    path: Path

    def append(self, model: str, handed: Handed) -> None:
        """Add that a client has the model with fingerprint ``model``."""
        result = handed.result
        document = {"result": asdict(result)} if result else {"client": handed.client}
        self._lines.append({"model": model, **document})

    def reported(self, model: str) -> dict[str, ClientResult | None]:
        """Return by name what clients that have that model reported.

        None stands for a client that keeps its figures to itself.

        Raises
        ------
        RunError
            If the file is damaged elsewhere than in its last line.
        """
        records = [one for one in self._lines.read() if one.get("model") == model]
        handed = (self._handed(record) for record in records)
        return {one.client: one.result for one in handed}

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.path)

    def _handed(self, record: Mapping[str, Any]) -> Handed:
        if isinstance(record.get("client"), str):
            return Handed(record["client"], None)
        text = json.dumps(record.get("result"))
        try:
            result = _CLIENT_RESULT.validate_json(text, strict=True)
        except ValidationError as error:
            raise RunError(
                f"a line of {self.path} is no client's result; remove the file and "
                f"resume the run: {error}"
            ) from error
        return Handed(result.client, result)
