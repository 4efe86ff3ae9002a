"""Which versions the two sides run, and how the gateway says its own."""

import functools
import importlib.metadata
from collections.abc import Mapping

from knnper.transport.diagnosis.finding import Finding, fine, problem, warning

GATEWAY_HEADERS: Mapping[str, str] = {
    "knnper": "knnper-version",
    "flwr": "knnper-flwr-version",
}
"""By package, the header in which the gateway tells its version with ``/health``."""


@functools.cache
def own_versions() -> Mapping[str, str]:
    """Return the installed versions, by package."""
    return {package: importlib.metadata.version(package) for package in GATEWAY_HEADERS}


def told_versions(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the versions in a gateway's answer; empty of any other server.

    Parameters
    ----------
    headers
        Of the answer, with lower-case names.
    """
    return {
        package: headers[name]
        for package, name in GATEWAY_HEADERS.items()
        if name in headers
    }


def version_finding(own: Mapping[str, str], theirs: Mapping[str, str]) -> Finding:
    """Return whether the two sides' versions go together.

    Messages and fingerprints are those of one minor version: ``1.41`` of ``1.41.0``.
    """
    shown = ", ".join(f"{package} {version}" for package, version in own.items())
    others = ", ".join(f"{package} {version}" for package, version in theirs.items())
    if not theirs:
        return fine(f"{shown}; the server does not tell its own")
    if own == theirs:
        return fine(f"{shown}, on both sides")
    advice = "install the same versions on both sides"
    found = f"{shown} here, {others} on the server"
    if any(
        _minor(own[package]) != _minor(version) for package, version in theirs.items()
    ):
        return problem(found, advice, "the same minor version of each")
    return warning(found, advice, "the same versions")


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
