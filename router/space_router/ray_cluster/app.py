"""The application for Ray Serve: `serve run space_router.ray_cluster.app:app model=PATH max_workers=3`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from space_common.process import log_to_stderr

from space_router.api.schema import DocumentedApp
from space_router.ray_cluster.cluster import Cluster
from space_router.ray_cluster.replicas import HANDOVER_SECONDS, Present, RouterReplica, WorkerReplica
from space_router.ray_cluster.scaling import Scaling

try:
    import ray
    from ray import serve
except ImportError as error:
    raise ImportError(
        "space_router.ray_cluster.app needs Ray Serve, which is not installed here: pip install 'spaceserve[ray]', on "
        "every machine of the cluster."
    ) from error

HEALTH_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # for workers to answer with their addresses
MORE_THAN_QUEUED = 1_000_000  # no limit in Ray: the router's own queue is bounded and answers 429


class RayWorker:
    """A deployment whose replicas are worker processes."""

    async def __init__(self, cluster: Cluster) -> None:  # type: ignore[misc]  # Serve awaits it
        config = cluster.config()
        log_to_stderr(config.log_level, config.log_format)
        self._replica = WorkerReplica(config, ray.util.get_node_ip_address())
        await self._replica.start()

    async def meet(self, num_requests: int, secret: str) -> str:
        return self._replica.meet(num_requests, secret)

    async def check_health(self) -> None:
        self._replica.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._replica.record_autoscaling_stats()

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):
            await self._replica.stop()


class Router:
    """A deployment with the router as its only replica, because a worker serves one router at a time."""

    async def __init__(self, cluster: Cluster, workers: Any) -> None:  # type: ignore[misc]
        config = cluster.config()
        log_to_stderr(config.log_level, config.log_format)
        self._workers = workers
        self._cluster = cluster
        self._replica = RouterReplica(config, self._meet, min_workers=cluster.min_workers, explain=self._explain)
        self._application = await self._replica.start()

    def __serve_build_asgi_app__(self) -> DocumentedApp:
        return self._application

    async def _meet(self, num_requests: int, secret: str) -> Present:
        responses = self._workers.broadcast("meet", num_requests, secret)
        answers = await responses.results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        addresses = frozenset(answer for answer in answers if isinstance(answer, str))
        return Present(addresses, is_complete=len(addresses) == len(answers))

    def _explain(self) -> str:
        """Return what a worker asks for and what the cluster has, which tells why workers are not placed."""
        whole, free = ray.cluster_resources(), ray.available_resources()
        asked = {"CPU": self._cluster.cpus_per_worker, "GPU": self._cluster.gpus_per_worker}
        parts = [
            f"{number} {name} (the cluster has {whole.get(name, 0.0):g}, {free.get(name, 0.0):g} free)"
            for name, number in asked.items()
            if number
        ]
        return f"each asks for {' and '.join(parts)}" if parts else "each asks for no processor and no GPU"

    async def __del__(self) -> None:
        """Stop the replica; Serve awaits this after the requests have ended or timed out."""
        if hasattr(self, "_replica"):
            await self._replica.stop()


def app(args: Mapping[str, Any]) -> Any:
    """Build the application for `import_path`. `args`: see `spaceserve ray --help`. Raises ConfigError."""
    cluster = Cluster.of(args)
    drain = cluster.config().drain_timeout
    workers = serve.deployment(RayWorker).options(
        name="Worker",
        **(_scaling(cluster) if cluster.max_workers > cluster.min_workers else {"num_replicas": cluster.min_workers}),
        ray_actor_options={"num_cpus": cluster.cpus_per_worker, "num_gpus": cluster.gpus_per_worker},
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=drain + 2 * HANDOVER_SECONDS,
    )
    router = serve.deployment(serve.ingress()(Router)).options(
        num_replicas=1,
        max_ongoing_requests=MORE_THAN_QUEUED,
        # None of its own: it would take a worker's, and behind a dead router a waiting worker would take it.
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=drain,
    )
    return router.bind(cluster, workers.bind(cluster))


def _scaling(cluster: Cluster) -> dict[str, Any]:
    policy = {
        "policy_function": f"{Scaling.__module__}:{Scaling.__name__}",
        "policy_kwargs": {"requests_per_worker": cluster.requests_per_worker},
    }
    return {
        "autoscaling_config": {
            "min_replicas": cluster.min_workers,
            "max_replicas": cluster.max_workers,
            "upscale_delay_s": cluster.upscale_delay,
            "downscale_delay_s": cluster.downscale_delay,
            "metrics_interval_s": 1.0,
            "look_back_period_s": 5.0,
            "policy": policy,
        }
    }
