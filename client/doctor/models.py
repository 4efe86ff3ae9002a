"""The models and the memory that a client keeps; this loads torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from client.residence.pending import pending_serving
from client.residence.places import Places
from client.residence.serving import read_serving
from datastore.errors import StoreError
from datastore.folder import DATABASE, open_store
from knnper.transport.diagnosis.finding import (
    Finding,
    fine,
    problem,
    skipped,
    warning,
)
from knnper.transport.model_folder.errors import ModelError
from knnper.transport.model_folder.files import load_model
from knnper.transport.model_folder.global_model import require_fingerprint

_AGAIN = (
    "have the run hand it over again (start knnper client), or bring it: knnper "
    "onboard --model FOLDER"
)


@dataclass(frozen=True)
class Kept:
    """What a client keeps.

    Attributes
    ----------
    places
        Its state folder.
    """

    places: Places

    def models(self) -> Finding:
        """Look whether the served model is there, and all models are what they were."""
        serving = read_serving(self.places.serving)
        if serving is None:
            return skipped("no model is installed yet")
        if not self.places.model(serving.model).is_dir():
            return problem(
                f"{self.places.serving} names the model {serving.model[:12]}, which is "
                f"not in {self.places.models}",
                _AGAIN,
            )
        broken = list(self._broken())
        if broken:
            return problem(
                "; ".join(broken),
                f"remove what is damaged from {self.places.models}, and {_AGAIN}",
                "the model that each folder is named after",
            )
        return fine(f"{serving.model[:12]} of {serving.run}; its fingerprint is right")

    def store(self) -> Finding:
        """Look whether the memory was embedded by the model that is served."""
        serving, pending = read_serving(self.places.serving), self._pending()
        if not (self.places.store / DATABASE).is_file():
            return warning(
                f"there is no memory in {self.places.store}",
                "knnper onboard fills one; knnper serve begins with an empty one",
            )
        try:
            with open_store(self.places.store) as store:
                embedded_by, count = store.fingerprint, len(store)
        except StoreError as error:
            advice = f"knnper store verify {self.places.store}"
            return problem(str(error), f"see what is left of it: {advice}")
        found = f"{count} examples, embedded by the model {embedded_by[:12]}"
        if embedded_by == pending:
            return fine(f"{found}, which is about to be served")
        if serving is not None and embedded_by != serving.model:
            return problem(
                found,
                "start knnper serve, which embeds them anew",
                f"the model that is served, {serving.model[:12]}",
            )
        return fine(found)

    def _pending(self) -> str | None:
        pending = pending_serving(self.places)
        return None if pending is None else pending.model

    def _broken(self) -> Iterator[str]:
        for folder in sorted(self.places.models.iterdir()):
            if folder.name.startswith("."):
                continue
            try:
                require_fingerprint(load_model(folder), folder.name, str(folder))
            except ModelError as error:
                yield str(error)
