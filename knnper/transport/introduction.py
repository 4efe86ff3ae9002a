"""What a client with data of its own says of itself before anything is learned."""

import dataclasses
from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

_RECORD = "introduction"


@dataclass(frozen=True)
class Introduction:
    """A client's name and the sizes of its splits; nothing else leaves it.

    Attributes
    ----------
    name
        The client's name, as its configuration has it.
    train
        Whether it takes part in training.
    num_train, num_validation, num_test
        Examples in its splits.
    problem
        Why it cannot take part, for those who operate the server; empty if it can.
    """

    name: str
    train: bool = True
    num_train: int = 0
    num_validation: int = 0
    num_test: int = 0
    problem: str = ""


def introduction_content(introduction: Introduction) -> RecordDict:
    """Return the content of a message that says who a client is."""
    return RecordDict({_RECORD: ConfigRecord(dataclasses.asdict(introduction))})


def read_introduction(content: RecordDict) -> Introduction:
    """Return what a client said of itself."""
    record = content.config_records.get(_RECORD)
    if record is None:
        return Introduction("", problem="it did not say who it is: another version?")
    try:
        return Introduction(**record)  # type: ignore[arg-type]
    except TypeError as error:
        return Introduction("", problem=f"{error}; it runs another version")
