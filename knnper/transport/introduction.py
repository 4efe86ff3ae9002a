"""What a client with data of its own says of itself before anything is learned."""

import dataclasses
from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

from knnper.config.errors import CodecError
from knnper.config.names import is_name
from knnper.config.ranges import LARGEST_COUNT
from knnper.transport.foreign_text import printable
from knnper.transport.rebuilding import plain_fields

_RECORD = "introduction"
_LONGEST_NAME = 255


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
    remark
        Why it takes part otherwise than they may expect, for them too.
    """

    name: str
    train: bool = True
    num_train: int = 0
    num_validation: int = 0
    num_test: int = 0
    problem: str = ""
    remark: str = ""


def introduction_content(introduction: Introduction) -> RecordDict:
    """Return the content of a message that says who a client is."""
    return RecordDict({_RECORD: ConfigRecord(dataclasses.asdict(introduction))})


def read_introduction(content: RecordDict) -> Introduction:
    """Return what a client said of itself; nothing of it is trusted.

    Where it cannot be true, what is wrong is its `Introduction.problem`.
    """
    record = content.config_records.get(_RECORD)
    if record is None:
        return Introduction("", problem="it did not say who it is: another version?")
    try:
        said = plain_fields(Introduction, record)
        _require_possible(said)
    except CodecError as error:
        return Introduction("", problem=printable(str(error)))
    problem, remark = printable(said.problem), printable(said.remark)
    return dataclasses.replace(said, problem=problem, remark=remark)


def _require_possible(said: Introduction) -> None:
    if len(said.name) > _LONGEST_NAME or not is_name(said.name):
        raise CodecError(
            f"expected a name of letters, digits, '.', '_' and '-', found {said.name!r}"
        )
    for count in (said.num_train, said.num_validation, said.num_test):
        if not 0 <= count <= LARGEST_COUNT:
            raise CodecError(f"expected a number of examples, found {count}")
