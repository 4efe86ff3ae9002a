"""The serial engine: virtual clients as function calls, without Flower and Ray."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from typing_extensions import override

from knnper.client.runtime import ClientRuntime, TrainingRequest
from knnper.errors import KnnPerError, OwnCodeError
from knnper.records import canonical
from knnper.secure.messages import SecureRequest
from knnper.server.federation import Federation, Reply, Request, Step
from knnper.transport.messages import Purpose


@dataclass(frozen=True)
class SerialFederation(Federation):
    """A `Federation` that calls the clients as functions.

    Records are copied to canonical form, as if they were sent.
    """

    runtime: ClientRuntime

    @override
    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            try:
                record = self._answer(step, request)
            except OwnCodeError:
                raise
            except KnnPerError as error:
                yield Reply(request.clients, None, str(error))
            else:
                yield Reply(request.clients, canonical(record))

    def _answer(self, step: Step, request: Request) -> Any:
        clients = request.clients
        payload = canonical(request.payload)
        if step.purpose is Purpose.TRAIN:
            (client,), (state_round,) = clients, request.state_rounds
            return self.runtime.train(
                TrainingRequest(
                    client,
                    payload,
                    request.server_round or step.server_round,
                    state_round,
                    step.keep_rounds,
                    step.server_round,
                    request.masking and canonical(request.masking),
                )
            )
        if step.purpose is Purpose.SECURE:
            request_of_stage = cast(SecureRequest, payload)
            return self.runtime.secure_sums.answer(clients, request_of_stage)
        if step.purpose is Purpose.VALIDATE:
            reference = request.reference and canonical(request.reference)
            return self.runtime.validate(
                clients, payload, reference, step.server_round, request.state_rounds
            )
        reference = canonical(request.reference)
        return self.runtime.personalize(
            clients, payload, reference, request.state_rounds
        )
