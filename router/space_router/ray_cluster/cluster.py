"""`spaceserve ray`: the arguments of the Ray Serve application, and its config file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from space_common.process import say

from space_router.config import ServeConfig, build, settings
from space_router.errors import ConfigError
from space_router.setting import help_texts, seconds, setting, whole

_ray = partial(setting, "Ray cluster")
_PLAIN = (
    "router and workers there prove a secret to each other and speak unencrypted, so keep the cluster's network private"
)

ELSEWHERE = {
    "host": "`http_options` of the Serve config say where its proxy listens",
    "port": "`http_options` of the Serve config say where its proxy listens",
    "grpc_port": "Serve's proxy passes HTTP on; for gRPC run `spaceserve router`",
    "tls_cert": "Serve's proxy speaks to clients: see ssl_certfile in its `http_options`",
    "tls_key": "Serve's proxy speaks to clients: see ssl_keyfile in its `http_options`",
    "max_connections": "Serve's proxy holds the connections",
    "keep_alive": "see keep_alive_timeout_s in the `http_options` of the Serve config",
    "max_header": "Serve's proxy reads the headers",
    "slow_reader_timeout": "Serve's proxy holds what a client has not read",
    "client_buffer": "Serve's proxy holds what a client has not read",
    "workers": "give min_workers and max_workers",
    "worker_address": "workers are Ray's replicas; for others run `spaceserve router`",
    "placement": "Ray places router and workers",
    "worker_tls_ca": _PLAIN,
    "worker_tls_cert": _PLAIN,
    "worker_tls_key": _PLAIN,
    "worker_secret_file": "the router makes a secret at each start, and Ray takes it to the workers",
}
"""Flags of `spaceserve serve` that have no effect on a Ray cluster -> what replaces them."""


@dataclass(frozen=True)
class Cluster:
    """The arguments of the application."""

    min_workers: int = _ray(1, whole(1, 1024, "N"))
    """fewest workers; a new one reads its weights first"""
    max_workers: int = _ray(1, whole(1, 1024, "N"))
    """most workers; as many as min_workers: no scaling"""
    requests_per_worker: int = _ray(32, whole(1, 4096, "REQUESTS"))
    """requests, running and queued, for which there is one worker; the default is half a CPU's --max-sequences"""
    upscale_delay: float = _ray(10.0, seconds(0))
    """seconds that more workers have to be wanted before they are started"""
    downscale_delay: float = _ray(300.0, seconds(0))
    """seconds that fewer workers have to do before one is ended; starting it again costs its weights' reading"""
    gpus_per_worker: int = _ray(1, whole(0, 64, "GPUS"))
    """GPUs of one worker, all on one machine; more than one are its ranks (--tensor-parallel); 0 runs on the CPU"""
    cpus_per_worker: int = _ray(1, whole(0, 1024, "CPUS"))
    """processors that Ray sets aside for one worker"""
    flags: Mapping[str, str] = field(default_factory=dict)  # those of `spaceserve serve`, as texts

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Cluster:
        """Parse the `args` of a Serve config file or of `serve run`. Raises ConfigError."""
        own = {f.name: f.metadata["setting"] for f in fields(cls) if "setting" in f.metadata}
        values: dict[str, Any] = {}
        flags: dict[str, str] = {}
        for name, given in arguments.items():
            text = _text(given)
            if name in own:
                try:
                    values[name] = own[name].parse(text)
                except ValueError as error:
                    raise ConfigError(f"{name}={text!r}: {error}.") from None
            elif name in ELSEWHERE:
                raise ConfigError(f"{name}={text!r} does nothing on a Ray cluster: {ELSEWHERE[name]}.")
            elif name in settings():
                flags[name] = text
            else:
                raise ConfigError(
                    f"There is no argument {name!r}. Give those of `spaceserve ray --help`, which are "
                    f"{', '.join(own)}, and any flag of `spaceserve serve`, with _ for -."
                )
        if "max_workers" not in values:
            values["max_workers"] = values.get("min_workers", cls.max_workers)
        cluster = cls(**values, flags=flags)
        if cluster.min_workers > cluster.max_workers:
            raise ConfigError(
                f"min_workers={cluster.min_workers} is more than max_workers={cluster.max_workers}: give at "
                "least as many max_workers."
            )
        ranks = cluster.config().tensor_parallel if "tensor_parallel" in flags else max(1, cluster.gpus_per_worker)
        if cluster.gpus_per_worker and ranks != cluster.gpus_per_worker:
            raise ConfigError(
                f"tensor_parallel={ranks} does not fit gpus_per_worker={cluster.gpus_per_worker}: each rank has "
                "one GPU. Leave tensor_parallel out."
            )
        if ranks > 1:
            cluster = cls(**values, flags=flags | {"tensor_parallel": str(ranks)})
        cluster.config()
        return cluster

    def config(self) -> ServeConfig:
        """Return the configuration of the router and the workers, for the calling machine. Raises ConfigError."""
        return build(self.flags, {})


def _text(given: object) -> str:
    """Return a value as on a command line. YAML reads on and off as true and false."""
    if isinstance(given, bool):
        return "on" if given else "off"
    if isinstance(given, list):
        return ",".join(map(_text, given))
    return str(given)


_EXAMPLES = """\
examples:
  spaceserve ray model=Qwen/Qwen3-8B max_workers=8 > serve.yaml     one router, 1 to 8 workers of a GPU each
  serve deploy serve.yaml                                           on the running Ray cluster (ray start --head)
  spaceserve ray model=PATH gpus_per_worker=2 kv_memory=0.8         any flag of `spaceserve serve`, with _ for -
  serve run space_router.ray_cluster.app:app model=demo gpus_per_worker=0     without a file

Needs `pip install 'spaceserve[ray]'` on every machine of the cluster; this command itself does not. See docker/RAY.md.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 2 for invalid arguments."""
    options = _parser().parse_args(argv)
    words = [word.partition("=") for word in options.arguments]
    try:
        if wrong := [name for name, equals, _ in words if not equals]:
            raise ConfigError(f"{wrong[0]!r} is no NAME=VALUE: write model=PATH, max_workers=3 and the like.")
        say(config_file({name: text for name, _, text in words}, host=options.host, port=options.port))
    except ConfigError as error:
        sys.stderr.write(f"spaceserve ray: {error}\n")
        return 2
    return 0


def config_file(arguments: dict[str, str], *, host: str, port: int) -> str:
    """Return the config file for `serve deploy`. Raises ConfigError for arguments that the application would refuse."""
    Cluster.of(arguments)
    lines = [f"  {name}: {json.dumps(text)}" for name, text in arguments.items()]
    return "\n".join(
        [
            "# made by `spaceserve ray`; deployed by `serve deploy`",
            f"http_options: {{host: {json.dumps(host)}, port: {port}}}",
            "applications:",
            "- name: spaceserve",
            "  route_prefix: /",
            "  import_path: space_router.ray_cluster.app:app",
            "  args:" if lines else "  args: {}",
            *(f"  {line}" for line in lines),
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve ray",
        description="Prints the config file with which Ray Serve places a router and its workers over a Ray cluster "
        "and scales the workers with the load.",
        epilog=f"{_arguments()}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("arguments", nargs="*", metavar="NAME=VALUE", help="see below")
    parser.add_argument("--host", default="127.0.0.1", help="where Serve's proxy listens [default: %(default)s]")
    parser.add_argument("--port", type=int, default=8000, help="its port [default: %(default)s]")
    return parser


def _arguments() -> str:
    texts = help_texts(Cluster)
    known: list[Any] = [one for one in fields(Cluster) if "setting" in one.metadata]
    lines = [f"  {one.name:<22}{texts[one.name]} [default: {one.default}]" for one in known]
    return "\n".join(["arguments, beside the flags of `spaceserve serve` (as kv_memory=0.8):", *lines])


if __name__ == "__main__":
    sys.exit(main())
