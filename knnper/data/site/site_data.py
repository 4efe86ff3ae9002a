"""A site's own data, ready to be learned from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from knnper.data.examples import ClientData, Examples
from knnper.data.site.agreement import SiteTask
from knnper.data.site.splits import SPLITS, Split


@dataclass(frozen=True)
class NamedExamples:
    """Examples with their owner's names for them.

    Attributes
    ----------
    examples
        n of them.
    names
        One each, unique over all of the site's splits and the same whenever the data
        is opened: a path relative to the data folder, a value of an id column, or a
        place such as ``train/00012``.
    """

    examples: Examples
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True)
class SiteData:
    """All of a site's data, in memory.

    Attributes
    ----------
    train, validation, test
        The splits; labels are those of ``task``.
    task
        What the data was read for.
    dropped
        How many examples have each label that the federation does not know, where the
        site chose to leave these out.
    num_ignored
        Files beside the images that are no images by their names.
    unreadable
        Why, by name, of the images that cannot be read; `open_site` refuses them.
    """

    train: NamedExamples
    validation: NamedExamples
    test: NamedExamples
    task: SiteTask
    dropped: Mapping[str, int] = field(default_factory=dict)
    num_ignored: int = 0
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def splits(self) -> Iterator[tuple[Split, NamedExamples]]:
        """Yield each split with its name: train, validation, test."""
        for split in SPLITS:
            yield split, getattr(self, split)

    def client_data(self) -> ClientData:
        """Return what a method may see of it: all but the test split."""
        return ClientData(self.train.examples, self.validation.examples)
