"""Update processors: steps between a client's training and the server's aggregation.

A processor wraps a method, as a personalisation does. Its client half changes the
update that the method's `client_update` returns; its server half, `decoded`, restores
an update that the method's `aggregate` takes. So no method knows of its processors.
Processors nest, the first to act innermost:

    clip and add noise, protect at the site, compress

Masks come last and are no processor: the client's runtime has the secrets for them.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData
from knnper.errors import CodecError
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Personalizer, origins
from knnper.strategies.core.records import require_finite


class UpdateProcessor(Personalizer):
    """Changes the updates of a method on their way from a client to the server.

    A subclass overrides `process`; if updates then have another form, also `decoded`
    and ``update_type``.
    """

    @abstractmethod
    def process(self, payload: Any, update: Any, rng: RandomKey) -> Any:
        """Return the update to send for ``update``, of the method below, all finite."""

    @override
    def client_update(
        self,
        payload: Any,
        client_state: Any,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[Any, Any]:
        state, update = self.method.client_update(
            payload, client_state, data, server_round, rng
        )
        require_finite("update", update)
        return state, self.process(payload, update, rng)

    @override
    def decoded(self, payload: Any, update: Any) -> Any:
        """Decode the update for `aggregate`; raise CodecError if it is invalid."""
        inner = self.method.decoded
        return update if inner is None else inner(payload, update)

    def require_origins(self, payload: Any, update: Any) -> Mapping[str, Tensor]:
        """Return the origins of a valid update, by path; raise CodecError otherwise."""
        if self.update_problem is not None:
            problem = self.update_problem(payload, update)
            if problem is not None:
                raise CodecError(problem)
        return origins(self, payload, update)
