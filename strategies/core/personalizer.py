"""What can be put on top of a method: another way to serve a client in the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from knnper.config.errors import Problem
from knnper.config.sections import Experiment, Settings
from strategies.core.method import Method, no_problems
from strategies.core.task import Task


@dataclass(frozen=True)
class PersonalizerSpec:
    """An entry in the table of what the section ``personalization`` can name.

    Attributes
    ----------
    title
        What is added to a method's title in tables, as in ``kNN``; empty for nothing.
    summary
        One sentence.
    source
        Paper and equation or section.
    settings_type
        What the section takes beside the name.
    apply
        ``(task, method, settings) -> Method``: the method with another `personalize`.
    unseen
        How a client that took no part in training is served, on top of the method.
    needs_one_model
        Whether the method must serve one set of weights to each client.
    needs_proxy
        Whether the server must have examples of its own; see `Task.proxy`.
    check
        Finds what in an experiment does not go together with it.
    """

    title: str
    summary: str
    source: str
    settings_type: type[Settings]
    apply: Callable[[Task, Method, Any], Method]
    unseen: str
    needs_one_model: bool = False
    needs_proxy: bool = False
    check: Callable[[Experiment], Sequence[Problem]] = no_problems
