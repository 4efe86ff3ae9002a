"""Which clients have the final model, and what they reported about it."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from knnper.errors import RunError
from knnper.files import JsonLines
from knnper.strategies.core.evaluation import ClientResult


class _ReportLine(BaseModel):
    """A client that has a model, and its result unless it withholds it."""

    model: str
    client: str | None = None
    result: ClientResult | None = None


@dataclass(frozen=True, eq=False)
class Reported(Mapping[str, ClientResult | None]):
    """Results by client; None for a client that has the model and withholds them.

    Results stay in the file until they are read: there may be a million.

    Attributes
    ----------
    places
        By client, the position of its line in the file.
    withheld
        Clients without a result.
    """

    path: Path
    places: Mapping[str, int]
    withheld: Collection[str]

    def __getitem__(self, client: str) -> ClientResult | None:
        return next(self.of([client]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, client: object) -> bool:
        return client in self.places

    def of(self, clients: Iterable[str]) -> Iterator[ClientResult | None]:
        """Yield the results of these clients, in their order."""
        if not self.places:
            return
        with self.path.open("rb") as file:
            for client in clients:
                file.seek(self.places[client])
                try:
                    line = _ReportLine.model_validate_json(file.readline(), strict=True)
                except ValidationError as error:
                    raise _damaged(self.path, error) from error
                yield line.result


@dataclass(frozen=True)
class ShownResults(Iterable[ClientResult]):
    """Results of the clients that do not withhold them, sorted by title.

    Attributes
    ----------
    titles
        Titles of clients, where they differ from the names.
    """

    reported: Reported
    clients: Collection[str]
    titles: Mapping[str, str]

    def __iter__(self) -> Iterator[ClientResult]:
        def title(name: str) -> str:
            return self.titles.get(name, name)

        withheld = self.reported.withheld
        shown = sorted(
            (client for client in self.clients if client not in withheld), key=title
        )
        for name, result in zip(shown, self.reported.of(shown), strict=True):
            if result is not None:
                yield replace(result, client=title(name))


@dataclass(frozen=True)
class DistributionLog:
    """A file with a line for each client that has a model."""

    path: Path

    def append(self, model: str, reports: Mapping[str, ClientResult | None]) -> None:
        """Note that clients have the model with fingerprint ``model``."""
        JsonLines(self.path).append(
            *(
                {
                    "model": model,
                    **({"result": _plain(result)} if result else {"client": client}),
                }
                for client, result in reports.items()
            )
        )

    def reported(self, model: str) -> Reported:
        """Find the reports of clients that have the model with this fingerprint."""
        places: dict[str, int] = {}
        withheld: set[str] = set()
        for place, line in JsonLines(self.path).placed():
            if line.get("model") != model:
                continue
            client = self._client(line)
            places[client] = place  # the last report counts
            if "result" in line:
                withheld.discard(client)
            else:
                withheld.add(client)
        return Reported(self.path, places, withheld)

    def _client(self, line: Mapping[str, Any]) -> str:
        named = line.get("result", line)
        client = named.get("client") if isinstance(named, Mapping) else None
        if not isinstance(client, str):
            raise _damaged(self.path, f"found {client!r} as the client's name")
        return client


def _damaged(path: Path, reason: object) -> RunError:
    return RunError(
        f"a line of {path} is no client's result: {reason}; remove the file and resume "
        "the run"
    )


def _plain(result: ClientResult) -> dict[str, Any]:
    """Return the same as `dataclasses.asdict`, in a tenth of its time."""
    evaluations = ("personal", "reference", "validation")
    return vars(result) | {name: vars(getattr(result, name)) for name in evaluations}
