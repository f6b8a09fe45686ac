"""Several servers on Ray Serve: `serve run orchestrator.serve.fleet:app model=FILE ram=12GiB`.

Each replica loads the model and runs the same application as `moe-edge serve`. Ray listens on the
port, starts replicas on nodes with enough memory, and forwards requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray import is_initialized, serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client

from gguf_tools.process import default_threads
from orchestrator.errors import ConfigError
from orchestrator.serve.app import metrics_of
from orchestrator.serve.routing import Router
from orchestrator.serve.service import DAY_S, Service
from orchestrator.serve.settings import options_of
from orchestrator.serve.views import of_replica, together


def app(args: dict[str, Any]) -> serve.Application:
    """Return the Ray Serve application for `serve run` and `serve deploy`.

    `args` are options of `moe-edge serve`, as {name: value}. Raises MoeEdgeError for a wrong option
    or value, and OSError for a file that cannot be read.
    """
    for name in ("host", "port"):
        if name in args:
            raise ConfigError(f"leave out {name}: set {name} in the http_options of Ray instead")
    args = {**args, **_place()}
    config, settings = options_of(args)
    if settings.allow_model_change:
        raise ConfigError(
            "leave out allow-model-change: on Ray Serve, all server processes have the same model"
        )
    if config.ram is None:
        raise ConfigError(
            "ram is missing: give ram=SIZE, the memory that Ray reserves for each server process"
        )
    settings.keys()
    return serve.deployment(
        Replica,
        request_router_config=RequestRouterConfig(request_router_class=Router),
        max_ongoing_requests=settings.parallel + settings.queue,
        graceful_shutdown_timeout_s=settings.timeout or DAY_S,
        ray_actor_options={
            "memory": config.ram,
            "num_cpus": config.threads or default_threads(),
        },
    ).bind(args)


def _place() -> dict[str, str]:
    """Return {"host": the address that Ray listens on}, or {} if Ray does not run.

    The settings need the host, because a server that other machines can reach requires an API key.
    """
    client = _get_global_client(raise_if_no_controller_running=False) if is_initialized() else None
    return {} if client is None else {"host": client.http_config.host}


@serve.ingress()
class Replica:
    """One server process of a fleet, with its own copy of the model."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        config, settings = options_of(args)
        self._service = Service(config, settings, logging.getLogger("ray.serve").info)
        self._service.state.all_metrics = self._all_metrics
        self._service.load(lambda _what, _done: None)

    def __serve_build_asgi_app__(self) -> Any:
        return self._service.app

    async def metrics(self) -> str:
        """Return the metrics of this replica in Prometheus' format.

        Each metric has the label `replica` with this replica's id.
        """
        text = await metrics_of(self._service.state)
        return of_replica(text, serve.get_replica_context().replica_id.unique_id)

    async def _all_metrics(self) -> str:
        """Return the metrics of all replicas as one text in Prometheus' format."""
        context = serve.get_replica_context()
        all_of_them = serve.get_deployment_handle(context.deployment, context.app_name)
        return together(await all_of_them.broadcast("metrics").results_async())

    def __del__(self) -> None:
        """Stop the service. Ray calls this after the last request has ended."""
        service = getattr(self, "_service", None)
        if service is not None:
            service.drain()
