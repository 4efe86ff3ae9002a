"""A client's state folder: what it keeps, whatever process looks after it."""

import logging
import shutil
from pathlib import Path

from client.residence.building import build
from client.residence.decision import Decided
from client.residence.errors import ResidenceError
from client.residence.identity import claim
from client.residence.pending import read_pending
from client.residence.places import Places
from client.residence.renewal import prepare, settle
from client.residence.serving import Serving, read_serving
from datastore.errors import StoreBusyError
from datastore.folder import DATABASE, open_store
from knnper.data.site.site_data import SiteData
from knnper.transport.model_folder.errors import ModelError
from knnper.transport.model_folder.files import load_model
from knnper.transport.model_folder.global_model import (
    GlobalModel,
    require_fingerprint,
)

_LOG = logging.getLogger(__name__)


class Residence:
    """One client's models, memory and what it serves.

    Parameters
    ----------
    folder
        The client's state folder; created if it is missing.
    name
        The client's.
    key_sha256
        Of its public key, in hexadecimal; None where none is used.

    Raises
    ------
    ResidenceError
        If the folder is another client's.
    """

    def __init__(self, folder: Path, name: str, key_sha256: str | None = None) -> None:
        self.name = name
        self.places = Places(folder)
        claim(self.places, name, key_sha256)

    def install(
        self, model: GlobalModel, data: SiteData, *, took_part: bool
    ) -> Serving:
        """Remember ``data`` by ``model``, and serve that; return what is served.

        See `install_and_test`.
        """
        return self.install_and_test(model, data, took_part=took_part).serving

    def install_and_test(
        self, model: GlobalModel, data: SiteData, *, took_part: bool
    ) -> Decided:
        """As `install`; return also how what is served does on the test split.

        The memory keeps what it has, embedded anew; what is new in the data by name is
        added. Where another process writes to the memory, as the service does, that
        process finishes the work (`ServedModel.refresh`). A kill at any point leaves
        what was served, or what is to be.

        Parameters
        ----------
        model
            The global model.
        data
            The site's examples, read for that model.
        took_part
            Whether the model may have been trained on the site's training split.

        Raises
        ------
        ResidenceError
            If data, model and memory are not for the same inputs and classes.
        StoreFullError
            If the memory takes all or nothing, and there is no room for all.
        """
        _require_same_task(model, data)
        with self.places.installing():
            shutil.rmtree(self.places.drafts, ignore_errors=True)
            if not self.has_store():
                return build(self.places, self.name, model, data, took_part=took_part)
            decided = prepare(self.places, model, data, took_part=took_part)
            self._settle_unless_busy(model)
        return decided

    def served(self) -> Serving | None:
        """Return what is served; None if nothing was installed yet.

        Raises
        ------
        ResidenceError
            If the file that says so is damaged.
        """
        return read_serving(self.places.serving)

    def load(self, fingerprint: str) -> GlobalModel:
        """Return a model that was installed.

        Raises
        ------
        ModelError
            If it is missing or damaged.
        """
        folder = self.places.model(fingerprint)
        try:
            model = load_model(folder)
            require_fingerprint(model, fingerprint, str(folder))
        except ModelError as error:
            _LOG.error("%s", error)
            raise ModelError(
                f"the model {fingerprint[:12]} in {folder} is missing or was damaged; "
                "get it again: knnper onboard, with --model FOLDER for an exported one"
            ) from error
        return model

    def has_store(self) -> bool:
        """Return whether there is a memory."""
        return (self.places.store / DATABASE).is_file()

    def _settle_unless_busy(self, model: GlobalModel) -> None:
        pending = read_pending(self.places)
        if pending is None:
            return
        try:
            with open_store(self.places.store, writable=True) as store:
                settle(self.places, store, pending, model)
        except StoreBusyError as error:
            _LOG.info("left to the process that serves: %s", error)


def _require_same_task(model: GlobalModel, data: SiteData) -> None:
    found, expected = data.task, model.card.learned
    if (found.spec, found.class_names) != (expected.spec, expected.class_names):
        raise ResidenceError(
            f"the data was read for {found.spec} and the classes "
            f"{', '.join(found.class_names)}; the model is for {expected.spec} and "
            f"the classes {', '.join(expected.class_names)}. Read the data for the "
            "model at hand"
        )
