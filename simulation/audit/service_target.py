"""Attacks on the memory of a site as its service shows it, over HTTP."""

import io
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx
import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor
from typing_extensions import override

from knnper.client.service.documents import (
    Document,
    Info,
    InputPrediction,
    Predictions,
)
from knnper.client.service.tokens import read_or_create_owner_token
from knnper.client.settings import ClientSettings
from knnper.client.site_state import SiteState
from knnper.data.examples import Examples, no_examples
from knnper.data.site import open_site
from knnper.data.site_data import SiteData
from knnper.datastore.private_answers import PrivateAnswerSettings
from knnper.datastore.store import open_store
from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.simulation.audit.audit import Attack, Target
from knnper.simulation.audit.canaries import private_answers_game
from knnper.simulation.audit.figures import AttackResult
from knnper.simulation.audit.membership import (
    MEMORY_ATTACKS,
    Memory,
    memory_results,
    sampled,
)
from knnper.simulation.audit.one_run import ONE_RUN, audit_in_one_run

_MOST_QUERIES = 2000
_TIMEOUT_S = 60.0
D = TypeVar("D", bound=Document)


@dataclass(frozen=True)
class ServiceTarget(Target):
    """A running service, with the stored examples and others; see `open_service`.

    ``privacy``: settings of its private answers, if it gives any.
    """

    memory: Memory
    stored: Examples
    others: Examples
    privacy: PrivateAnswerSettings | None = None

    @property
    @override
    def attacks(self) -> Mapping[str, Attack]:
        return {ONE_RUN: self._one_run, **dict.fromkeys(MEMORY_ATTACKS, self._memory)}

    def _one_run(self, _: Sequence[str], key: RandomKey) -> Iterator[AttackResult]:
        if self.privacy is None:
            reason = "the answers claim no privacy"
            yield AttackResult(ONE_RUN, "private answers", left_out=reason)
        else:
            game = private_answers_game(self.privacy)
            yield audit_in_one_run(game, key.child(ONE_RUN))

    def _memory(self, attacks: Sequence[str], key: RandomKey) -> Iterator[AttackResult]:
        share = min(1.0, _MOST_QUERIES / (len(self.stored) + len(self.others)))
        queries, is_member = sampled(
            self.stored, self.others, share, key.child("queries")
        )
        outcome = self.memory.attack(queries, key.child("attack")), is_member
        reason = "service.privacy withholds the values that the attack needs"
        yield from memory_results(attacks, "memory", [outcome], reason)


def open_service(settings: ClientSettings) -> ServiceTarget:
    """Connect to the service of a client on this machine, as its owner.

    Raises
    ------
    RunError
        If the service does not answer, or serves another model or with another privacy
        than the client's files have, or if the owner's data has no test examples.
    """
    info = _request(settings, Info, "/info")
    site_state = SiteState(settings.state, settings.name, door=settings.door)
    serving, privacy = site_state.served(), settings.service.privacy
    served, expected = (
        f"the model {model and model.model} with (ε, δ) = "
        f"{answers and (answers.epsilon, answers.delta)}"
        for model, answers in ((info, info.privacy), (serving, privacy))
    )
    if serving is None or served != expected:
        raise RunError(
            f"{settings.service.address} serves {served}, expected {expected}; give "
            "the file of the client that serves there, and restart the service if the "
            "file has changed"
        )
    model = site_state.load(serving.model)
    torch.set_num_threads(model.card.num_threads)
    with open_store(site_state.folder.store) as store:
        names = frozenset(store.external_ids(store.contents().ids))
        num_stored = len(store)
    data = open_site(settings.data, settings.base, model.card.learned, settings.cache)
    stored, others = split_by_store(data, names)

    def ask(inputs: Tensor) -> list[InputPrediction]:
        file = io.BytesIO()
        np.save(file, inputs.reshape(-1, *info.input_shape).numpy())
        content = file.getvalue()
        answer = _request(settings, Predictions, "/predict", content)
        return answer.predictions

    knn_weight = serving.knn_weight if privacy is None else privacy.knn_weight
    memory = Memory(
        ask,
        model.embed,
        model.head,
        knn_weight,
        serving.num_neighbors,
        serving.kernel,
        serving.kernel_scale,
        num_stored,
    )
    facts = {
        "address": str(settings.service.address),
        "stored": num_stored,
        **info.model_dump(include={"client", "model", "knn_weight", "privacy"}),
    }
    return ServiceTarget(facts, memory, stored, others, privacy)


def split_by_store(
    data: SiteData, names: frozenset[str | None]
) -> tuple[Examples, Examples]:
    """Return the stored examples, and the test examples that are not stored.

    Other examples are left out: the global model may have been trained on them.
    """
    stored, others = no_examples(data.task.spec), no_examples(data.task.spec)
    for split, part in data.splits():
        is_stored = torch.tensor([name in names for name in part.names])
        stored = stored.join(part.examples.take(torch.nonzero(is_stored)[:, 0]))
        if split == "test":
            others = part.examples.take(torch.nonzero(~is_stored)[:, 0])
    if len(stored) == 0 or len(others) == 0:
        raise RunError(
            f"found {len(stored)} stored examples and {len(others)} test examples that "
            "are not stored, expected some of both: the audit compares the answers to "
            "them. Give the client's data a test split"
        )
    return stored, others


def _request(
    settings: ClientSettings, kind: type[D], path: str, content: bytes | None = None
) -> D:
    """Return the service's answer, a document of this kind; RunError for another."""
    tls, token_file = settings.service.tls, settings.state / "token"
    token = read_or_create_owner_token(token_file)
    context = ssl.create_default_context(
        cafile=None if tls is None else tls.certificate
    )
    # The service is known by its own certificate, under whatever name it has.
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{settings.service.address.on_this_machine}{path}"
    try:
        response = httpx.request(
            "GET" if content is None else "POST",
            url,
            content=content,
            headers={
                "authorization": f"Bearer {token}",
                "content-type": "application/x-npy",
            },
            timeout=_TIMEOUT_S,
            verify=context,
            trust_env=False,
        )
        if response.is_success:
            return kind.model_validate_json(response.content)
        problem = f"answered {response.status_code}: {response.text[:500]}"
    except (httpx.HTTPError, OSError, ValidationError) as error:
        problem = str(error)
    raise RunError(
        f"{url}: {problem}; expected a running `knnper site serve` of this version, "
        f"with the owner's token in {token_file}"
    )
