"""Routes requests to the replicas of a fleet. Ray's own processes import this, without a model."""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class Router(ConsistentHashRouter):
    """Sends requests with the same `x-session-id` header to the same replica of a fleet.

    That replica holds the conversation's prefix in its KV cache. If it is full, or the request has
    no such header, the replica with the fewest requests gets the request.
    """

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the replicas that may get a request, as lists in order of preference.

        Ray tries the first list first. If the request has a session id, the first list has the
        replicas to which the session belongs, and the second list has all others. Otherwise one
        list has all replicas.
        """
        if pending_request is None or not pending_request.metadata.session_id:
            return [candidate_replicas]
        ranked = await super().choose_replicas(candidate_replicas, pending_request)
        own = ranked[0] if ranked else []
        return [own, [each for each in candidate_replicas if each not in own]]
