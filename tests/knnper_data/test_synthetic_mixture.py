import json

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from knnper.data.synthetic_mixture import SyntheticMixtureSettings, density

SMALL = SyntheticMixtureSettings(
    num_users=6, num_samples=50, num_classes=5, num_clusters=2
)


def test_the_density_by_hand() -> None:
    # ½ over five labels is 0.1 each. User 3 is of cluster 1, and its own label is
    # 2 + 3 mod 3 = 2; user 4 is of cluster 0, and its own label is 2 + 4 mod 3 = 3.
    assert density(SMALL, 3).tolist() == pytest.approx([0.1, 0.35, 0.35, 0.1, 0.1])
    assert density(SMALL, 4).tolist() == pytest.approx([0.35, 0.1, 0.1, 0.35, 0.1])


def test_the_test_split_is_the_density() -> None:
    for settings in (SMALL, SyntheticMixtureSettings(num_samples=1)):
        test = settings.load().test
        assert test.client_ids is not None
        for user in range(settings.num_users):
            labels = test.labels[test.client_ids == user]
            assert len(labels) == 4 * settings.num_classes
            counts = np.bincount(labels, minlength=settings.num_classes)
            np.testing.assert_allclose(counts / len(labels), density(settings, user))


def test_the_examples_follow_the_density() -> None:
    settings = SyntheticMixtureSettings(num_users=2, num_samples=100_000)
    train = settings.load().train
    for user in range(2):
        labels = train.labels[user * 100_000 : (user + 1) * 100_000]
        found = np.bincount(labels, minlength=50) / len(labels)
        # Five standard deviations of a share of ¼ of so many draws.
        np.testing.assert_allclose(found, density(settings, user), atol=7e-3)


def test_the_seed_fixes_the_examples_and_more_begin_with_the_fewer() -> None:
    first, again, other = (
        SyntheticMixtureSettings(seed=seed).load().train.labels for seed in (0, 0, 1)
    )
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()
    few, many = (
        SyntheticMixtureSettings(num_users=3, num_samples=count).load().train.labels
        for count in (5, 20)
    )
    assert many.reshape(3, 20)[:, :5].tolist() == few.reshape(3, 5).tolist()


def test_every_user_has_as_many_examples_of_the_same_input() -> None:
    train = SMALL.load().train
    assert train.images.shape == (300, 1, 1, 1)
    assert train.images.dtype == np.float32
    assert set(train.images.ravel().tolist()) == {1.0}
    np.testing.assert_array_equal(train.client_ids, np.arange(300) // 50)


def test_clusters_leave_labels_for_users() -> None:
    given = {"num_classes": 4, "num_clusters": 4}
    with pytest.raises(ValidationError, match="expected more classes than clusters"):
        TypeAdapter(SyntheticMixtureSettings).validate_json(json.dumps(given))
