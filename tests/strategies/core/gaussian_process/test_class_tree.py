from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.seeding import RandomKey
from knnper.strategies.core.gaussian_process import ClassTree, Split, class_tree


def line(points: Sequence[float]) -> Tensor:
    return torch.tensor(points)[:, None]


def test_near_classes_stay_together() -> None:
    # Means: class 7 at 0, class 2 at 1, class 5 at 10, class 9 at 12. The first split
    # is {7, 2} from {5, 9}, then each pair.
    labels = torch.tensor([7, 7, 2, 5, 9])
    tree = class_tree(line([-1, 1, 1, 10, 12]), labels)
    assert tree.classes == (2, 5, 7, 9)
    root, *below = tree.splits
    assert {root.left, root.right} == {(2, 7), (5, 9)}
    assert [split.depth for split in below] == [1, 1]
    assert tree.depth == 2


def test_the_clusters_are_moved_to_their_means() -> None:
    # Nearer to 0 than to 10: 0, 4, 4.5, 4.9, whose mean is 3.35; that of 5.2 and 10 is
    # 7.6. The middle is now 5.475: 5.2 changes sides, and then nothing does.
    tree = class_tree(line([0, 4, 4.5, 4.9, 5.2, 10]), torch.arange(6))
    assert {tree.splits[0].left, tree.splits[0].right} == {(0, 1, 2, 3, 4), (5,)}


def test_signs_by_hand() -> None:
    assert Split(0, (1, 3), (0,)).signs(5).tolist() == [-1, 1, 0, 1, 0]


@pytest.mark.parametrize("num_classes", [0, 1])
def test_there_is_nothing_to_split(num_classes: int) -> None:
    tree = class_tree(torch.ones(num_classes, 2), torch.arange(num_classes))
    assert tree == ClassTree(tuple(range(num_classes)), ())
    assert tree.depth == 0


@settings(max_examples=40, deadline=None)
@given(
    num_classes=st.integers(1, 12),
    num_places=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_every_class_has_a_leaf_of_its_own(
    num_classes: int, num_places: int, seed: int
) -> None:
    generator = RandomKey(seed).numpy()
    embeddings = torch.from_numpy(generator.integers(0, num_places, (20, 2))).float()
    labels = torch.from_numpy(generator.integers(0, num_classes, 20))
    tree = class_tree(embeddings, labels)

    assert tree.classes == tuple(sorted(set(labels.tolist())))
    assert len(tree.splits) == len(tree.classes) - 1
    paths = {
        label: tuple(
            (number, label in split.left)
            for number, split in enumerate(tree.splits)
            if label in split.left + split.right
        )
        for label in tree.classes
    }
    assert len(set(paths.values())) == len(tree.classes)
    for split in tree.splits:
        assert split.left
        assert split.right
        assert not set(split.left) & set(split.right)
    for label, path in paths.items():
        depths = [tree.splits[number].depth for number, _ in path]
        assert depths == list(range(len(depths))), label
    assert class_tree(embeddings, labels) == tree


def test_means_that_are_the_same_or_undefined_are_halved() -> None:
    for value in (1.0, torch.nan):
        tree = class_tree(torch.full((5, 2), value), torch.arange(5))
        assert [(split.left, split.right) for split in tree.splits[:2]] == [
            ((0, 1, 2), (3, 4)),
            ((0, 1), (2,)),
        ]
