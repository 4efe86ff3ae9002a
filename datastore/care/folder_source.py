"""Examples in one folder of images for each class."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from knnper.config.errors import DataError
from knnper.data.class_folders import ImageShape, decoded, list_class_folders


@dataclass(frozen=True)
class FolderSource:
    """Images in one folder for each class.

    An image's external id is its path in the folder; its size is made that of the
    store's, as the data set ``image_folder`` does with ``image_size``.
    """

    root: Path
    external_ids: tuple[str, ...]
    labels: Tensor
    image_shape: ImageShape
    num_ignored: int = 0
    arrivals: None = None

    def images(self, positions: Sequence[int]) -> Tensor:
        """See `datastore.care.sources.Source`."""
        paths = [self.root / self.external_ids[one] for one in positions]
        return decoded(paths, self.image_shape)


def folder_source(
    root: Path, image_shape: ImageShape, class_names: Sequence[str]
) -> FolderSource:
    """Return the images in ``root``, in an order that mixes the classes.

    The order depends on their paths in the folder alone: a policy that keeps the first
    or the last ones must not keep those of one class.

    Parameters
    ----------
    root
        Has one folder for each class; what is no image by its suffix is left out.
    image_shape
        What they are made.
    class_names
        One for each label.

    Raises
    ------
    DataError
        If a class is unknown, or something lies where it does not belong.
    """
    found = list_class_folders(root)
    _require_classes(root, found.classes, class_names)
    label_of = {name: label for label, name in enumerate(class_names)}
    labels = [label_of[name] for name in found.class_of.values()]
    return FolderSource(
        root,
        tuple(found.class_of),
        torch.tensor(labels, dtype=torch.int64),
        image_shape,
        found.num_ignored,
    )


def _require_classes(
    root: Path, classes: Sequence[str], class_names: Sequence[str]
) -> None:
    unknown = [name for name in classes if name not in class_names]
    if unknown:
        raise DataError(
            f"{root} has folders of classes that the store does not know: "
            f"{', '.join(unknown)}; expected some of {', '.join(class_names)}. Rename "
            "them, or leave them out"
        )
