"""A site's own data as the data source of a client's runtime."""

from dataclasses import dataclass

from knnper.data.examples import ClientData, Examples
from knnper.data.site.site_data import SiteData


@dataclass(frozen=True)
class SiteSource:
    """The data of the only client of this process.

    Attributes
    ----------
    site
        All of its data.
    train
        Whether it takes part in training.
    """

    site: SiteData
    train: bool

    def data(self, client: str) -> ClientData:  # noqa: ARG002 (there is one)
        """Return what the client learns from."""
        return self.site.client_data()

    def test(self, client: str) -> Examples:  # noqa: ARG002
        """Return the test split."""
        return self.site.test.examples

    def class_weights(self, client: str) -> None:
        """Return None: a site's own test examples all count the same."""

    def is_seen(self, client: str) -> bool:  # noqa: ARG002
        """Return whether the client takes part in training."""
        return self.train
