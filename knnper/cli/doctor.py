"""``knnper doctor``: what is wrong with a client or a server, and how to mend it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnper.cli.errors import RUN_FAILED
from knnper.cli.options import AsJson
from knnper.cli.output import print_json, tell
from knnper.cli.store.options import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from knnper.transport.diagnosis.finding import Check, Examined

_MARKS = {"ok": "✓", "skipped": "-", "warning": "!", "problem": "✗"}
_INDENT = " " * 19

ClientFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="CLIENT.yaml", help="The client's file."),
]
ServerFile = Annotated[
    Path | None,
    typer.Option(
        "--server",
        metavar="SERVER.yaml",
        help="The server's file, on the server's own machine.",
    ),
]


def doctor(
    config: ClientFile = None, server: ServerFile = None, as_json: AsJson = False
) -> None:
    """Say what is wrong with a client, a server or the way between, and how to mend it.

    Nothing is changed, and a client or server that runs is not disturbed. The exit
    code is 1 when something is wrong, 2 when a file is.
    """
    if config is None and server is None:
        raise typer.BadParameter(
            "give --config CLIENT.yaml, --server SERVER.yaml, or both"
        )
    # Both files are read first: one that is wrong ends the command with 2.
    of_server = None if server is None else _of_server(server)
    of_client = None if config is None else _of_client(config)
    found = [
        _examined(patient) for patient in (of_server, of_client) if patient is not None
    ]
    if as_json:
        print_json([one.as_document() for one in found])
    else:
        for one in found:
            _show(one)
    if not all(one.is_well for one in found):
        raise typer.Exit(RUN_FAILED)


@dataclass(frozen=True)
class _Patient:
    """A client or server, and what to look at."""

    kind: str
    name: str
    file: Path
    checks: "Sequence[Check]"


@dataclass(frozen=True)
class _Diagnosis:
    """A client or server, and what was found."""

    patient: _Patient
    examined: "Sequence[Examined]"

    @property
    def is_well(self) -> bool:
        return not self._of("problem")

    def as_document(self) -> dict[str, Any]:
        return {
            "kind": self.patient.kind,
            "name": self.patient.name,
            "file": str(self.patient.file),
            "well": self.is_well,
            "checks": [one.as_document() for one in self.examined],
        }

    def from_well_to_wrong(self) -> "list[Examined]":
        return [one for verdict in _MARKS for one in self._of(verdict)]

    def summary(self) -> str:
        wrong, doubtful = self._of("problem"), self._of("warning")
        if not wrong:
            warnings = f", with {counted(len(doubtful), 'warning')}" if doubtful else ""
            return f"Nothing is wrong{warnings}."
        subjects = ", ".join(one.subject for one in wrong)
        return f"{counted(len(wrong), 'problem')}: {subjects}"

    def _of(self, verdict: str) -> "list[Examined]":
        return [one for one in self.examined if one.finding.verdict == verdict]


def _of_client(file: Path) -> _Patient:
    # It loads torch, which `knnper --help` need not wait for.
    import knnper.transport  # noqa: F401 (tells Flower to send and look up nothing)
    from client.doctor.checks import client_checks
    from client.settings import read_client

    settings = read_client(file)
    return _Patient("client", settings.name, file, client_checks(settings))


def _of_server(place: Path) -> _Patient:
    from server.link.doctor.checks import server_checks
    from server.link.layout import server_file
    from server.settings import read_server

    file = server_file(place)
    settings = read_server(file)
    return _Patient("server", settings.name, file, server_checks(settings))


def _examined(patient: _Patient) -> _Diagnosis:
    from knnper.transport.diagnosis.finding import examine

    return _Diagnosis(patient, examine(patient.checks))


def _show(diagnosis: _Diagnosis) -> None:
    patient = diagnosis.patient
    tell(f"{patient.kind} {patient.name} ({patient.file})")
    for one in diagnosis.from_well_to_wrong():
        finding = one.finding
        tell(f"  {_MARKS[finding.verdict]} {one.subject:<14} {finding.found}")
        if finding.expected:
            tell(f"{_INDENT}expected: {finding.expected}")
        if finding.mend:
            tell(f"{_INDENT}mend: {finding.mend}")
    tell(f"{diagnosis.summary()}\n")
