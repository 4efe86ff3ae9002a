"""No value of a site's data, and no name of its files, gets to the server in errors."""

import ast
import builtins
import copy
import errno
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import ArrayRecord, Message

from knnper.client import site as host
from knnper.client.limits import ANSWERS
from knnper.client.site_runtime import OWN_LOG
from knnper.data.characters import CHARACTER_NAMES
from knnper.datastore.examples import StoreBusyError
from knnper.errors import DataError, KnnPerError, RefusedError, text_for_others
from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment
from knnper.reasons import Code, SafeReason, Word
from knnper.server.directory import Directory
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.catalogue import for_sites
from knnper.strategies.core import evaluation
from knnper.strategies.core.assembly import assemble
from knnper.transport.messages import Job, Purpose, pack, packed_of, to_content, unpack
from tests.apps.data_faults import (
    CLASSES,
    COLUMNS,
    FAULTS,
    NAME,
    NUMBER,
    code,
    rows,
    table,
)
from tests.apps.site_grid import SiteGrid
from tests.own.import_path import clean_import_path

pytestmark = pytest.mark.usefixtures("inside_a_run", "own_modules")
ROOT = Path(__file__).parents[2]
CLIENT, NODE = "site-a", 10
DETAILS = "the client's own log has the details"
ROUNDS = (Purpose.TRAIN, Purpose.VALIDATE, Purpose.PERSONALIZE)
DATA: dict[str, dict[str, Any]] = {
    "rows": {
        "image_shape": [1, 1, 2],
        "class_names": list(CLASSES),
        "mean": [0, 0],
        "std": [1, 1],
        "dtype": "float32",
        "feature_names": list(COLUMNS),
    },
    "images": {
        "image_shape": [4, 4, 1],
        "class_names": list(CLASSES),
        "mean": [0],
        "std": [1],
    },
    "text": {
        "image_shape": [1, 1, 80],
        "class_names": list(CHARACTER_NAMES),
        "mean": [],
        "std": [],
        "dtype": "token",
    },
}
FAILING = f"""
def failing(logits, labels):
    raise ValueError(f"{NAME} {NUMBER} {{labels.tolist()}}")
"""
REASON = SafeReason(
    Code.MODEL_NOT_ALLOWED,
    found=Word("mlp", {"mlp"}),
    allowed=(Word("none", CLASSES), Word("HIV", CLASSES)),
)


@pytest.fixture
def own_modules() -> Iterator[None]:
    with clean_import_path("reader", "mine"):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the site's folder, whose name is private, too."""
    made = tmp_path / NAME
    made.mkdir()
    return made


@functools.cache
def experiment_over(kind: str) -> Experiment:
    return experiment(data={"name": "sites", **DATA[kind]})


def experiment(*, folder: Path | None = None, **changes: Any) -> Experiment:
    """Return an experiment over sites, by default with rows."""
    data = changes.pop("data", {"name": "sites", **DATA["rows"]})
    is_text = data.get("dtype") == "token"
    document = {
        "name": "x",
        "data": data,
        "partition": {"name": "sites"},
        "model": {"name": "stacked_lstm" if is_text else "mlp"},
        "training": {"num_rounds": 1, "batch_size": 4},
        "method": {"name": "knn_per"},
        "run": {"seed": 0},
        **changes,
    }
    return load_experiment(document, experiment_catalogue(), folder=folder)


class RecordingGrid(SiteGrid):
    """Keeps everything that it gets from a site."""

    def __init__(self, file: Path) -> None:
        super().__init__({NODE: file})
        self.received: list[str] = []

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        self.received.append(content_of(reply))
        return reply


def content_of(message: Message) -> str:
    """Return everything in a message as text."""
    parts = [repr(vars(message.metadata))]
    if message.has_error():
        return "\n".join([*parts, repr(vars(message.error))])
    for name, record in message.content.items():
        parts.append(f"{name}: {dict(record)!r}")
        if isinstance(record, ArrayRecord):
            parts += [repr(array.data) for array in record.values()]
    return "\n".join(parts)


def site_of(folder: Path, reader: dict[str, Any], **settings: Any) -> Path:
    """Write a client's file and return its path; ``reader`` is its section data."""
    described = {
        "name": CLIENT,
        "server": "127.0.0.1:1",
        "insecure": True,
        "limits": {"min_examples": 1},
        "data": reader,
        **settings,
    }
    file = folder / f"{NAME}.yaml"
    file.write_text(yaml.safe_dump(described))
    return file


def refused(grid: RecordingGrid, asked: Experiment) -> str:
    """Return why the server does not let the site take part; empty if it does."""
    directory = Directory(grid, for_sites(asked), dict)  # type: ignore[arg-type]
    for _ in range(3):
        directory.refresh()
    return "".join(directory.refused())


def ask(grid: RecordingGrid, asked: Experiment, purpose: Purpose) -> Message:
    """Send a message of a round; return the reply."""
    data: Any = asked.data.settings
    assembly = assemble(asked, data.task().spec)
    state = assembly.method.init([CLIENT], assembly.key)
    packed = pack(assembly.method.broadcast(state, CLIENT, assembly.key))
    job = Job([CLIENT], 1, [0], for_sites(asked), state_rounds=[0])
    content = to_content(job, {"payload": packed, "reference": packed})
    return grid.answer(Message(content, NODE, purpose.value))


def require_nothing_private(grid: RecordingGrid) -> None:
    assert grid.received
    for received in grid.received:
        assert NAME not in received
        assert NUMBER not in received


@pytest.mark.parametrize("name", FAULTS)
def test_server_gets_code_and_no_value_of_faulty_data(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fault = FAULTS[name]
    grid = RecordingGrid(site_of(folder, fault.write(folder)))
    asked = experiment_over(fault.kind)
    assert f"({fault.code})" in refused(grid, asked)
    for purpose in ROUNDS:
        assert f"({fault.code})" in str(ask(grid, asked, purpose).error.reason)
    require_nothing_private(grid)
    assert NAME in caplog.text, "the site's own log has the details"


def test_server_gets_number_of_faulty_row(folder: Path) -> None:
    data = FAULTS["row_with_a_comma_too_many"].write(folder)
    grid = RecordingGrid(site_of(folder, data))
    assert "row 5 of its table" in refused(grid, experiment())


@pytest.mark.parametrize(
    ("key", "value"),
    [("limit", NAME), ("data", {"name": NAME}), ("server", NAME), ("train", NUMBER)],
)
def test_server_gets_nothing_of_wrong_settings(
    folder: Path, key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    grid = RecordingGrid(site_of(folder, table(folder, rows()), **{key: value}))
    # Whether the site shares metrics is not known.
    assert refused(grid, experiment()).endswith(OWN_LOG)
    for purpose in ROUNDS:
        assert ask(grid, experiment(), purpose).error.reason == OWN_LOG
    require_nothing_private(grid)
    assert NAME in caplog.text


def test_server_gets_nothing_of_reader_that_cannot_be_imported(folder: Path) -> None:
    reader = code(folder, "raise KeyError(NAME + NUMBER)")
    grid = RecordingGrid(site_of(folder, reader))
    assert refused(grid, experiment()).endswith(OWN_LOG)
    require_nothing_private(grid)


def test_server_gets_nothing_of_damaged_state(folder: Path) -> None:
    grid = RecordingGrid(site_of(folder, table(folder, rows())))
    (folder / "state").mkdir()
    (folder / "state" / ANSWERS).write_text(f'{{"kind": "{NAME}{NUMBER}"}}\n')
    assert "(unusable_state)" in refused(grid, experiment())
    shutil.rmtree(folder / "state")
    (folder / "state").write_text(NAME)
    assert "answered EEXIST (file_system)" in refused(grid, experiment())
    require_nothing_private(grid)


def test_quiet_site_sends_no_codes_either(folder: Path) -> None:
    data = FAULTS["row_with_a_comma_too_many"].write(folder)
    grid = RecordingGrid(site_of(folder, data, share_metrics=False))
    assert refused(grid, experiment()).endswith(f"cannot take part: {OWN_LOG}")
    for purpose in ROUNDS:
        assert ask(grid, experiment(), purpose).error.reason == OWN_LOG


def test_limits_name_no_code_of_the_site(folder: Path) -> None:
    allowed = {"models": ["mlp", f"{NAME}:Net"], "methods": [f"{NAME}:Method"]}
    limits = {"min_examples": 1, **allowed}
    grid = RecordingGrid(site_of(folder, table(folder, rows()), limits=limits))
    reason = refused(grid, experiment(model={"name": "softmax_regression"}))
    assert "found the model softmax_regression, expected mlp, own code" in reason
    assert "expected own code (limits.methods)" in reason
    require_nothing_private(grid)


def test_server_gets_nothing_of_similar_names_of_own_code(folder: Path) -> None:
    own_code = {"folder": ".", "allowed": [f"{NAME}:Net"]}
    site = site_of(folder, table(folder, rows()), own_code=own_code)
    grid = RecordingGrid(site)
    document = for_sites(experiment()).replace('"mlp"', f'"{NAME.lower()}:Net"')
    job = to_content(Job([], 0, [], document), {})
    reply = grid.answer(Message(job, NODE, Purpose.INTRODUCE.value))
    assert "(own_code_not_allowed)" in content_of(reply)
    require_nothing_private(grid)


def test_server_gets_line_and_class_of_failing_own_code(folder: Path) -> None:
    (folder / "mine.py").write_text(FAILING)
    own_code = {"folder": ".", "allowed": ["mine:failing"]}
    grid = RecordingGrid(site_of(folder, table(folder, rows()), own_code=own_code))
    training = {"num_rounds": 1, "batch_size": 4, "loss": "mine:failing"}
    asked = experiment(training=training, method={"name": "fedavg"}, folder=folder)
    assert refused(grid, asked) == ""
    reason = str(ask(grid, asked, Purpose.TRAIN).error.reason)
    assert "line 3 of a user's code failed with ValueError (own_code_failed)" in reason
    require_nothing_private(grid)


def test_server_gets_code_of_diverged_training(folder: Path) -> None:
    grid = RecordingGrid(site_of(folder, table(folder, rows())))
    training = {"num_rounds": 1, "batch_size": 4, "learning_rate": 1e30}
    reply = ask(grid, experiment(training=training), Purpose.TRAIN)
    assert "(diverged)" in str(reply.error.reason)


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def errors() -> list[Exception]:
    """Return an error of each class, in whose text there are private values."""
    python = {one for one in vars(builtins).values() if isinstance(one, type)}
    text, made = f"{NAME} has {NUMBER}", list[Exception]()
    for kind in subclasses(KnnPerError) | python:
        if issubclass(kind, Exception):
            error = kind.__new__(kind, text, [ValueError(text)])
            error.args = (2, text) if issubclass(kind, OSError) else (text,)
            made.append(error)
    named = type(NAME, (Exception,), {})(text)
    caused = RuntimeError(text)
    caused.__cause__ = OSError(errno.EACCES, text, text)
    return [*made, named, caused]


def test_no_text_of_any_error_is_for_others() -> None:
    raised = errors()
    assert len(raised) > 80
    for error in raised:
        text = text_for_others(error)
        assert NAME not in text
        assert NUMBER not in text
        assert text.endswith(DETAILS) or isinstance(error, RefusedError)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError(NAME), "the client failed unexpectedly with KeyError"),
        (type(NAME, (LookupError,), {})(NUMBER), "unexpectedly with LookupError"),
        (OSError(errno.ENOSPC, NAME), "the client's file system answered ENOSPC"),
        (MemoryError(NAME), "(out_of_memory)"),
        (KnnPerError(NAME), "(cannot_run)"),
    ],
)
def test_server_gets_class_of_unexpected_error(
    folder: Path, error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(host, "site_data", failing)
    grid = RecordingGrid(site_of(folder, table(folder, rows())))
    assert expected in refused(grid, experiment())
    assert expected in str(ask(grid, experiment(), Purpose.TRAIN).error.reason)
    require_nothing_private(grid)


def failing(*_: Any, **__: Any) -> Any:
    raise StoreBusyError(f"{NAME}'s store is held by {NUMBER}")


@pytest.mark.parametrize("is_quiet", [False, True])
def test_failed_installation_is_told_without_text(
    folder: Path, is_quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = site_of(folder, table(folder, rows()), share_metrics=not is_quiet)
    grid = RecordingGrid(file)
    monkeypatch.setattr(host, "installer_of", lambda *_: failing)
    packed = packed_of(ask(grid, experiment(), Purpose.PERSONALIZE).content, "reply")
    assert packed is not None
    expected = OWN_LOG if is_quiet else text_for_others(StoreBusyError())
    assert unpack(evaluation.ClientResults, packed).failures == {CLIENT: expected}
    require_nothing_private(grid)


def test_failed_validation_is_told_without_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = RecordingGrid(site_of(folder, table(folder, rows())))
    monkeypatch.setattr(evaluation, "evaluate", failing)
    packed = packed_of(ask(grid, experiment(), Purpose.VALIDATE).content, "reply")
    assert packed is not None
    expected = {CLIENT: text_for_others(StoreBusyError())}
    assert unpack(evaluation.Validation, packed).failures == expected
    require_nothing_private(grid)


@pytest.mark.parametrize("value", [NAME, None, True, b"x", [1], ("none",), Path(NAME)])
def test_reason_has_no_room_for_text(value: Any) -> None:
    with pytest.raises(TypeError, match="expected numbers, or words"):
        SafeReason(Code.UNREADABLE_ROW, row=value)


def test_reason_has_fields_of_its_code_alone() -> None:
    with pytest.raises(TypeError, match="has the fields"):
        SafeReason(Code.UNREADABLE_ROW)
    with pytest.raises(TypeError, match="has the fields"):
        SafeReason(Code.MISSING_FILE, row=5)


def test_word_is_of_known_words() -> None:
    assert Word("none", CLASSES) == "none"
    with pytest.raises(ValueError, match="that both machines know") as caught:
        Word(NAME, CLASSES)
    assert NAME not in str(caught.value)


def test_no_word_is_known_because_it_was_found() -> None:
    """In ``Word(word, known)`` the known words do not follow from the word."""
    calls = [
        node
        for file in ROOT.glob("[!t.]*/**/*.py")
        if "Word(" in (text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Word"
    ]
    assert len(calls) > 4
    for word, known in (call.args for call in calls):
        is_literal = isinstance(word, ast.Constant)
        assert is_literal or ast.dump(word) not in ast.dump(known)


@pytest.mark.parametrize(
    "error", [DataError(NAME, reason=REASON), RefusedError([REASON])]
)
def test_reasons_survive_another_process(error: KnnPerError) -> None:
    arrived = copy.deepcopy(error)  # by `__reduce__`, as Ray does
    assert text_for_others(arrived) == text_for_others(error)
    assert "found the model mlp, expected none, HIV" in text_for_others(arrived)


@pytest.mark.parametrize("code", Code)
def test_every_code_has_a_text_that_can_be_filled(code: Code) -> None:
    reason = SafeReason(code, **dict.fromkeys(code.fields, 7))
    assert str(reason).endswith(f"({code.label})")
