"""`spaceserve ray`: prints the checked Serve config file of a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from space_router.errors import ConfigError
from space_router.output import say
from space_router.ray_cluster.cluster import Cluster

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
    """Return the help text of the cluster's arguments."""
    known: list[Any] = [one for one in fields(Cluster) if "setting" in one.metadata]
    lines = [f"  {one.name:<22}{one.metadata['setting'].help} [default: {one.default}]" for one in known]
    return "\n".join(["arguments, beside the flags of `spaceserve serve` (as kv_memory=0.8):", *lines])


if __name__ == "__main__":
    sys.exit(main())
