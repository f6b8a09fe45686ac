"""Which replica of a fleet gets a request. Ray's own processes import this without a model."""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class Router(ConsistentHashRouter):
    """Sends a conversation where it was read, by the header `x-session-id`. What its replica has no
    room for goes to the one that has the fewest requests, as does what names no conversation."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        if pending_request is None or not pending_request.metadata.session_id:
            return [candidate_replicas]
        ranked = await super().choose_replicas(candidate_replicas, pending_request)
        own = ranked[0] if ranked else []
        return [own, [each for each in candidate_replicas if each not in own]]
