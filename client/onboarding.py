"""From "here is a model" to "this site serves it, with its own memory"."""

import time
from dataclasses import dataclass

import torch

from client.residence.errors import ResidenceError
from client.residence.residence import Residence
from client.residence.serving import Serving
from client.settings import ClientSettings
from knnper.data.site.catalogue import open_site
from knnper.transport.model_folder.global_model import GlobalModel

POLL_S = 0.2


@dataclass(frozen=True)
class Onboarded:
    """A client that has something to serve.

    Attributes
    ----------
    residence
        Its state folder.
    serving
        What it serves.
    took_part
        What was taken for granted: whether the model may have been trained on the
        site's training split; None where the server said so.
    """

    residence: Residence
    serving: Serving
    took_part: bool | None = None


def may_have_taken_part(settings: ClientSettings) -> bool:
    """Return whether a model has to be taken as trained on a site's data.

    It may wherever the site takes part in training: a site that lost its state looks
    like a new one, and what it was trained on tells nothing about what to expect.
    """
    return settings.train


def onboard(
    settings: ClientSettings, model: GlobalModel, *, took_part: bool | None = None
) -> Onboarded:
    """Let a client remember its own data by ``model``; nothing leaves the machine.

    Parameters
    ----------
    settings
        The client.
    model
        The global model.
    took_part
        Whether the model may have been trained on the site's training split; None is
        `may_have_taken_part`.

    Raises
    ------
    DataError
        If the site's data cannot be read, or does not fit the model.
    ResidenceError
        If the state folder is another client's, or holds a memory for another task.
    """
    residence = Residence(settings.state, settings.name)
    # As in the run, so that the last bits are those of the run, too.
    torch.set_num_threads(model.card.num_threads)
    data = open_site(settings.data, settings.base, model.card.learned, settings.cache)
    if took_part is None:
        took_part = may_have_taken_part(settings)
    serving = residence.install(model, data, took_part=took_part)
    return Onboarded(residence, serving, took_part)


def wait_until_installed(residence: Residence, patience_s: float) -> Onboarded:
    """Return what another process of this client installs, such as its node.

    Parameters
    ----------
    residence
        The client's state folder.
    patience_s
        For how long to wait.

    Raises
    ------
    ResidenceError
        If nothing was installed by then.
    """
    deadline = time.monotonic() + patience_s
    while True:
        serving = residence.served()
        if serving is not None:
            return Onboarded(residence, serving)
        if time.monotonic() >= deadline:
            raise ResidenceError(
                f"no model was installed in {residence.places.folder} within "
                f"{patience_s:g} seconds; look into the log of the client's node, or "
                "onboard with an exported model: knnper onboard --model FOLDER"
            )
        time.sleep(POLL_S)
