"""Reasons of failures that may be sent to another machine.

The text of an error can hold a row of data, the name of a file, or text from a library
or a user's code. It stays in the log of the machine where the error happened. Another
machine receives a `SafeReason`: a code of the closed list below, with numbers and words
that both machines know. It has no field for free text.
"""

import numbers
from collections.abc import Collection
from enum import Enum
from string import Formatter
from typing import TypeAlias


class Code(Enum):
    """Kind of a failure: its code in logs, and a text with fields in braces."""

    # The data of a site.
    UNREADABLE_DATA = (
        "unreadable_data",
        "its data is not as its settings describe it",
    )
    MISSING_FILE = (
        "missing_file",
        "a file or folder that its data settings name does not exist",
    )
    MISSING_PACKAGE = (
        "missing_package",
        "a Python package that its kind of data needs is not installed",
    )
    UNREADABLE_FILE = (
        "unreadable_file",
        "a file of its data is damaged, or not of the kind that its settings name",
    )
    UNREADABLE_ROW = (
        "unreadable_row",
        "row {row} of its table, counting the header, has too many or too few values",
    )
    UNREADABLE_EXAMPLES = (
        "unreadable_examples",
        "{count} of its examples cannot be read",
    )
    NOT_A_NUMBER = (
        "not_a_number",
        "feature {feature} of its table holds something that is no number",
    )
    VALUE_NOT_ALLOWED = (
        "value_not_allowed",
        "{count} values of its inputs are missing, not finite or out of range",
    )
    MISSING_VALUE = (
        "missing_value",
        "{count} rows of its table lack a label, name or text, first row {row}",
    )
    WRONG_COLUMNS = (
        "wrong_columns",
        "the columns of its table are not those that its settings, or the federation, "
        "name",
    )
    WRONG_SHAPE = (
        "wrong_shape",
        "its inputs or labels do not have the shape and type that the federation "
        "agreed on",
    )
    WRONG_KIND = (
        "wrong_kind",
        "its data is of another kind than the federation agreed on",
    )
    WRONG_LAYOUT = (
        "wrong_layout",
        "its folders or arrays are not laid out as its kind of data expects",
    )
    WRONG_TOKENIZER = (
        "wrong_tokenizer",
        "its tokenizer cannot be used, or is not that of the federation",
    )
    DUPLICATE_ID = (
        "duplicate_id",
        "{count} names of its examples are empty, not UTF-8, or occur more than once",
    )
    UNKNOWN_LABEL = (
        "unknown_label",
        "{labels} of its labels, of {examples} examples, are unknown to the federation",
    )
    UNKNOWN_SPLIT = (
        "unknown_split",
        "{count} of its examples have another split than train, validation or test",
    )
    WRONG_LABEL_MAP = (
        "wrong_label_map",
        "its data.label_map leads to a label that the federation does not have",
    )
    NO_EXAMPLES = ("no_examples", "its data holds no examples")

    # Code and weights of users.
    OWN_CODE = (
        "own_code",
        "the user's code is missing at the site, or returned something unexpected",
    )
    OWN_CODE_NOT_ALLOWED = (
        "own_code_not_allowed",
        "the experiment names code of a user that this site does not allow; allow it "
        "with own_code: {{folder: FOLDER, allowed: [NAME]}} in the client's file",
    )
    OWN_CODE_DIFFERS = (
        "own_code_differs",
        "the user's code that the experiment names has a different fingerprint on this "
        "machine; bring the same files to all machines",
    )
    OWN_CODE_FAILED = (
        "own_code_failed",
        "line {line} of a user's code failed with {error}",
    )
    FROZEN_WEIGHTS = (
        "frozen_weights",
        "expected a model whose frozen weights have the experiment's fingerprint; "
        "give the files of its weights in the client's file, as in pretrained: "
        "{{MODEL: FILE}}",
    )

    # Requests of the server.
    NOT_FOR_SITES = (
        "not_for_sites",
        "the experiment is not one over data that stays with the sites, or the two "
        "sides run different versions; submit it with `knnper fed submit`",
    )
    WRONG_NAME = (
        "wrong_name",
        "the experiment names a model, method or other part that cannot be used here",
    )
    BAD_REQUEST = (
        "bad_request",
        "the request is not for this client, or comes from another version of knnper",
    )
    SECURE_AGGREGATION = (
        "secure_aggregation",
        "a request of secure aggregation does not fit the round, or asks for more than "
        "the sum of the updates",
    )
    CLIP_RANGE = (
        "training.secure_aggregation.clip_range",
        "too many numbers of the update are beyond the range of secure aggregation; "
        "expected a larger range",
    )
    OTHER_MODEL = (
        "other_model",
        "the model that arrived is not the one that the server announced: damaged on "
        "its way, or made by another version",
    )
    DIVERGED = (
        "diverged",
        "numbers are not finite: training diverged; lower training.learning_rate",
    )

    # The client's machine.
    WRONG_SETTINGS = (
        "wrong_settings",
        "the client's own settings have mistakes or contradict the experiment",
    )
    UNUSABLE_STATE = (
        "unusable_state",
        "a file in the client's state folder is damaged or cannot be used",
    )
    UNUSABLE_MEMORY = (
        "unusable_memory",
        "the client's memory of examples cannot be used",
    )
    FILE_SYSTEM = ("file_system", "the client's file system answered {error}")
    OUT_OF_MEMORY = ("out_of_memory", "the client's machine ran out of memory")
    CANNOT_RUN = ("cannot_run", "the client cannot do what it was asked for")
    INTERNAL_ERROR = ("internal_error", "the client failed unexpectedly with {error}")

    # Limits that the site has set.
    OTHER_EXPERIMENT = (
        "limits.experiment",
        "found the experiment {found:064x}, expected {expected:064x}",
    )
    EXPERIMENT_CHANGED = (
        "limits",
        "found the experiment {found:064x}, expected {expected:064x} as when this run "
        "began; start a new run",
    )
    METHOD_NOT_ALLOWED = (
        "limits.methods",
        "found the method {found}, expected {allowed}",
    )
    MODEL_NOT_ALLOWED = (
        "limits.models",
        "found the model {found}, expected {allowed}",
    )
    NEEDS_METRICS = (
        "share_metrics",
        "the updates of {method} hold losses or statistics of the client's data, such "
        "as the frequency of each label; found share_metrics: false, or limits.privacy "
        "that does not share metrics and label_shares, expected true, or train: false "
        "to receive the model without training it",
    )
    TRAINS_NONE = (
        "train",
        "found train: false: the client receives the model without training it",
    )
    TOO_FEW_TO_TRAIN = (
        "limits.min_examples",
        "the client receives the model without training it: found {found} training "
        "examples, expected {least} or more",
    )
    TOO_FEW_EXAMPLES = (
        "limits.min_examples",
        "found {found:.4g} examples behind an update, expected {least} or more",
    )
    TOO_FEW_STEPS = (
        "limits.min_steps",
        "found {found:.4g} steps behind an update, expected {least} or more",
    )
    TRAINING_NEEDED = (
        "limits.training_rounds",
        "found a run that needs {missing} more answers (training), after {given} of "
        "{most} in {days} days",
    )
    VALIDATION_NEEDED = (
        "limits.validation_rounds",
        "found a run that needs {missing} more answers (validation), after {given} of "
        "{most} in {days} days",
    )
    NO_TRAINING_LEFT = (
        "limits.training_rounds",
        "no answer (training) is left: {given} of {most} in {days} days",
    )
    NO_VALIDATION_LEFT = (
        "limits.validation_rounds",
        "no answer (validation) is left: {given} of {most} in {days} days",
    )
    TOO_LITTLE_DATA = (
        "limits.min_examples",
        "found fewer examples or steps than the client's limits expect",
    )
    NOT_ONLY_WEIGHTS = (
        "limits.privacy",
        "the updates of {method} hold more than trained weights, which clip_norm "
        "cannot protect; expected another method, or train: false to receive the model "
        "without training it",
    )
    HAS_BUFFERS = (
        "limits.privacy",
        "the model has running statistics (BatchNorm), which noise can make invalid; "
        "expected a model without them, or train: false to receive the model without "
        "training it",
    )
    NO_PRIVACY_LEFT = (
        "limits.privacy",
        "the epsilon of the {period} would be {found:.4g} with this many more updates: "
        "{rounds}; expected {most:.4g} or less at delta {delta:.3g}",
    )

    @property
    def label(self) -> str:
        """The code, as logs show it."""
        return self.value[0]

    @property
    def text(self) -> str:
        """The message, with fields in braces."""
        return self.value[1]

    @property
    def fields(self) -> frozenset[str]:
        """The names of the text's fields."""
        parts = Formatter().parse(self.text)
        return frozenset(name for _, name, _, _ in parts if name is not None)


class Word(str):
    """A word of a list that both machines know, such as the names of the methods."""

    __slots__ = ()

    def __new__(cls, word: str, known: Collection[str]) -> "Word":
        """Return ``word``; raise `ValueError` unless it is in ``known``."""
        if word not in known:
            raise ValueError("expected a word that both machines know")
        return super().__new__(cls, word)

    def __getnewargs__(self) -> tuple[str, tuple[str]]:  # type: ignore[override]
        return str(self), (str(self),)


SafeField: TypeAlias = int | float | Word | tuple[Word, ...]


class SafeReason:
    """A failure code with its fields: numbers, and words known to both machines.

    Raises `TypeError` for fields that the code lacks and values of other types.
    """

    __slots__ = ("code", "fields")

    def __init__(self, code: Code, **fields: SafeField) -> None:
        if fields.keys() != code.fields:
            raise TypeError(f"{code.name} has the fields {sorted(code.fields)}")
        self.code = code
        self.fields = {name: _checked(value) for name, value in fields.items()}

    def __str__(self) -> str:
        shown = {
            name: (", ".join(value) or "none") if isinstance(value, tuple) else value
            for name, value in self.fields.items()
        }
        return f"{self.code.text.format(**shown)} ({self.code.label})"


def _checked(value: SafeField) -> SafeField:
    if isinstance(value, tuple) and all(type(word) is Word for word in value):
        return value
    if type(value) is Word:
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    expected = "expected numbers, or words that both machines know"
    raise TypeError(f"found {type(value).__name__}, {expected}")
