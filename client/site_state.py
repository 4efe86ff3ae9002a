"""One client's models and memory, and the model that it serves."""

import logging
import shutil
from collections.abc import Collection
from pathlib import Path

from knnper.audit_log import AuditLog
from knnper.client.data_changes import (
    DataChanges,
    all_new,
    find_changes,
    retry_if_deleted,
)
from knnper.client.install import Decided, build, prepare, settle
from knnper.client.state import (
    Offered,
    Serving,
    SiteStateError,
    StateFolder,
    claim,
    read_pending,
    read_serving,
)
from knnper.data.site_data import SiteData
from knnper.datastore.examples import StoreBusyError
from knnper.datastore.policy import policies_through
from knnper.datastore.store import DATABASE, open_store
from knnper.own import CLOSED, Door
from knnper.strategies.core.exported_model import (
    GlobalModel,
    ModelError,
    load_model,
    require_fingerprint,
)

_LOG = logging.getLogger(__name__)


class SiteState:
    """A client's state folder, with the operations that change it.

    Parameters
    ----------
    key_sha256
        Fingerprint of the client's key, if it has one.
    door
        Opens the site's own code and files for models and eviction policies.
    replaced
        Fingerprints of the client's earlier keys.

    Raises
    ------
    SiteStateError
        If the folder belongs to another client.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        key_sha256: str | None = None,
        door: Door = CLOSED,
        replaced: Collection[str] = (),
    ) -> None:
        self.name = name
        self.folder = StateFolder(folder)
        self._door = door
        policies_through(door)
        claim(self.folder, name, key_sha256, replaced)

    def install(
        self,
        model: GlobalModel,
        data: SiteData,
        *,
        took_part: bool,
        forget_vanished: bool = False,
    ) -> Decided:
        """Store ``data`` embedded by ``model``, choose λ, k and σ, and serve that.

        If another process has the memory open for writing, as the service does, that
        process finishes the installation (`ServedModel.refresh`).

        Parameters
        ----------
        took_part
            Whether the model may have been trained on this site's training split.
        forget_vanished
            Delete examples that are no longer in the data.
        """
        _require_read_for(model, data)
        with self.folder.installing():
            AuditLog.of(self.folder.path).append(
                "install_model",
                model=model.fingerprint,
                run=model.card.name,
                took_part=took_part,
                forget_vanished=forget_vanished,
            )
            shutil.rmtree(self.folder.drafts, ignore_errors=True)
            if not self.has_store():
                return build(self.folder, self.name, model, data, took_part=took_part)
            decided = prepare(
                self.folder,
                model,
                data,
                took_part=took_part,
                forget_vanished=forget_vanished,
            )
            self._finish()
        return decided

    def finish(self) -> None:
        """Finish an installation that was interrupted."""
        with self.folder.installing():
            self._finish()

    def _finish(self) -> None:
        pending = read_pending(self.folder)
        if pending is None:
            return
        try:
            with open_store(self.folder.store, writable=True) as store:
                model = self.load(pending.serving.model)
                settle(self.folder, store, pending, model)
        except StoreBusyError as error:
            _LOG.info("the process that serves finishes the installation: %s", error)

    def served(self) -> Serving | None:
        """Read which model is served and how; return None if none is installed."""
        return read_serving(self.folder.serving)

    def load(self, fingerprint: str) -> GlobalModel:
        """Load an installed model, and check its fingerprint."""
        folder = self.folder.model(fingerprint)
        try:
            model = load_model(folder, self._door)
            require_fingerprint(model, fingerprint, str(folder))
        except ModelError as error:
            _LOG.error("%s", error)
            raise ModelError(
                f"the model {fingerprint[:12]} in {folder} is missing or was damaged; "
                "get it again: knnper site onboard"
            ) from error
        return model

    def has_store(self) -> bool:
        """Return whether there is a memory."""
        return (self.folder.store / DATABASE).is_file()

    def changes(self, data: SiteData) -> DataChanges:
        """Compare ``data`` with the memory that was made of it."""
        if not self.has_store():
            return all_new(data)
        with open_store(self.folder.store) as store:
            return retry_if_deleted(
                lambda: find_changes(store, Offered(self.folder), data)
            )


def _require_read_for(model: GlobalModel, data: SiteData) -> None:
    """Reject data that was read for another task than the model's."""
    read_for = data.task
    learned = model.card.learned
    if read_for.feature_names != learned.feature_names:
        raise SiteStateError(
            "the data was read for the features "
            f"{', '.join(read_for.feature_names)}; the model is for "
            f"{', '.join(learned.feature_names)}"
        )
    if (read_for.spec, read_for.class_names) != (learned.spec, learned.class_names):
        raise SiteStateError(
            f"the data was read for {read_for.spec} and the classes "
            f"{', '.join(read_for.class_names)}; the model is for {learned.spec} and "
            f"the classes {', '.join(learned.class_names)}"
        )
