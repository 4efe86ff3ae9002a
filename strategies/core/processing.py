"""Update processors: steps between a client's training and the server's aggregation.

A processor wraps a method, as a personalisation does. Its client half changes the
update that the method's `client_update` returns; its server half, `decoded`, restores
an update that the method's `aggregate` takes. So no method knows of its processors.
Processors nest, the first to act innermost:

    clip, noise, protection by the site, mask or compress
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
from knnper.strategies.core.predictors import Predictor
from knnper.strategies.core.records import require_finite


class UpdateProcessor(Personalizer):
    """Changes the updates of a method on their way from a client to the server.

    A subclass overrides `process`, and what applies of the rest: `decoded` if updates
    travel in another form, then with another ``update_type``; `method_state` and
    `processor_state` if a client keeps a state for it, then with another
    ``client_state_type``.
    """

    @abstractmethod
    def process(
        self,
        payload: Any,
        update: Any,
        client_state: Any,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[Any, Any]:
        """Process the update of a client; return it, and what the client keeps.

        ``update``: of the method below, all finite. ``client_state``: the client's
        whole state before the round, None in its first. What the client keeps goes to
        `processor_state`; None for nothing.
        """

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
            payload, self.method_state(client_state), data, server_round, rng
        )
        require_finite("update", update)
        sent, kept = self.process(payload, update, client_state, server_round, rng)
        return self.processor_state(state, kept), sent

    @override
    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> Predictor:
        state = self.method_state(client_state)
        return self.method.personalize(payload, state, data, rng)

    @override
    def bytes_up(self, client_id: str) -> int:
        return self.method.bytes_up(client_id)

    @override
    def decoded(self, payload: Any, update: Any) -> Any:
        """Decode the update for `aggregate`; raise CodecError if it is invalid."""
        inner = self.method.decoded
        return update if inner is None else inner(payload, update)

    def method_state(self, client_state: Any) -> Any:
        """Return the part of a client's state that is the state of the method below."""
        return client_state

    def processor_state(self, method_state: Any, kept: Any) -> Any:
        """Join the state of the method below with what `process` keeps."""
        return method_state

    def require_origins(self, payload: Any, update: Any) -> Mapping[str, Tensor]:
        """Return the origins of a valid update, by path; raise CodecError otherwise."""
        if self.update_problem is not None:
            problem = self.update_problem(payload, update)
            if problem is not None:
                raise CodecError(problem)
        return origins(self, payload, update)
