"""What a site does with the model that it is handed: it serves it from then on."""

import logging
from collections.abc import Callable

from client.residence.residence import Residence
from client.runtime import Personalized, Served
from client.settings import ClientSettings
from client.site.refusals import note_refusal
from knnper.data.site.site_data import SiteData
from knnper.transport.credentials.node_keys import fingerprint, read_node_key
from knnper.transport.model_folder.errors import ModelError
from knnper.transport.model_folder.global_model import (
    ends_with_global_model,
    global_model,
    require_fingerprint,
)
from strategies.assembly import Assembly
from strategies.core.memory import KnnSettings
from strategies.experiments import title_of

log = logging.getLogger("flwr")

_SOURCE = "the model that the server handed over"


def residence_of(settings: ClientSettings) -> Residence:
    """Return the client's residence, which is that of its name and key alone.

    Raises
    ------
    ResidenceError
        If the state folder is another client's.
    CredentialError
        If the key cannot be read.
    """
    key = None
    if settings.key is not None:
        key = fingerprint(read_node_key(settings.key).public_key())
    return Residence(settings.state, settings.name, key)


def keeper_of(
    settings: ClientSettings, assembly: Assembly, data: SiteData, expected: str
) -> Callable[[Personalized], Served | None]:
    """Return what keeps the model of a hand-over, and the site's memory of its data.

    Where the experiment says how clients remember, the report of the hand-over is of
    what is served: of all that the memory holds, or of the global model alone where
    the memory loses. The report of another method is of what that makes.

    Parameters
    ----------
    settings
        The client.
    assembly
        What was trained.
    data
        The site's data.
    expected
        Fingerprint of the global model that the server hands over; empty where the
        method ends with none, and nothing can be served.
    """
    # As the server decides it, so that who waits for a model gets it.
    has_model = bool(expected) and ends_with_global_model(assembly.experiment)
    experiment = assembly.experiment
    title = title_of(experiment.method.name, experiment.personalization.name)

    def keep(personalized: Personalized) -> Served | None:
        if not has_model:
            log.warning(
                "the method ends with no model that all clients share: its result is "
                "reported, and nothing is served"
            )
            return None
        weights = personalized.reference.weights
        model = global_model(assembly.experiment, assembly.task, data.task, weights)
        try:
            require_fingerprint(model, expected, _SOURCE)
        except ModelError as error:
            note_refusal(settings.state, "model", str(error))
            raise
        decided = residence_of(settings).install_and_test(
            model, data, took_part=personalized.seen
        )
        log.info(
            "the model %s is installed, with a weight of %g for the neighbours",
            model.fingerprint[:12],
            decided.serving.knn_weight,
        )
        chosen = assembly.experiment.personalization.settings
        if not (
            assembly.method.serves_global_model and isinstance(chosen, KnnSettings)
        ):
            log.warning(
                "what is reported is what %s makes; what is served is the global model "
                "with a memory",
                title,
            )
            return None
        tested = decided.tested
        return Served(tested.mixed, tested.global_model, decided.chosen)

    return keep
