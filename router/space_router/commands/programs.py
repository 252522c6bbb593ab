"""The subcommands of `spaceserve` that are separate programs."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """A subcommand that runs `python -m MODULE`."""

    module: str
    help: str

    @property
    def exists(self) -> bool:
        """Whether it is installed; looked up without importing anything."""
        package, _, name = self.module.partition(".")
        spec = importlib.util.find_spec(package)
        folders = () if spec is None else spec.submodule_search_locations or ()
        places = [Path(folder, *name.split(".")) for folder in folders]
        return any(place.with_suffix(".py").is_file() or (place / "__main__.py").is_file() for place in places)


PROGRAMS: Mapping[str, Program] = {
    "worker": Program("space_server", "run a worker alone: the model, stepping for a router elsewhere"),
    "workers": Program("space_router.commands.workers_command", "list or restart the workers of a running server"),
    "ray": Program("space_router.ray_cluster.cluster", "router and workers on a Ray cluster: its Serve config file"),
    "train": Program("space_train", "train a SPACE checkpoint (SAR-SFT, draft head)"),
    "eval": Program("space_eval", "measure exactness, acceptance, quality and speed"),
    "bench": Program("space_eval.bench", "measure throughput and latency"),
    "chat": Program("space_router.commands.chat", "talk to a running server in this terminal"),
    "convert": Program("space_model.convert.command", "turn a checkpoint into one this server takes"),
}
