"""What the Ray Serve application is told is checked before anything is placed. No Ray is needed for it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from space_router.engine.workers.supervisor import worker_command
from space_router.errors import ConfigError
from space_router.ray_cluster.cluster import ELSEWHERE, Cluster, config_file, main
from space_router.ray_cluster.scaling import Scaling


def test_flags_of_serve_and_numbers_of_workers_come_as_text_or_as_yaml_reads_them() -> None:
    cluster = Cluster.of({"model": "demo", "max_workers": 3, "min_workers": "2", "speculation": False, "exact": True})
    assert (cluster.min_workers, cluster.max_workers) == (2, 3)
    assert Cluster.of({"min_workers": 4}).max_workers == 4, "as many as the fewest"
    config = cluster.config()
    assert (config.model, config.speculation, config.exact) == ("demo", "off", "on")


def test_the_gpus_of_a_worker_are_its_ranks() -> None:
    config = Cluster.of({"gpus_per_worker": 2}).config()
    command = worker_command(config, "10.0.0.1:50051")
    assert command[command.index("--tensor-parallel") + 1] == "2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_workres": 3}, "There is no argument 'max_workres'"),
        ({"max_workers": 0}, "max_workers='0': must be a whole number from 1 to 1024"),
        ({"min_workers": 3, "max_workers": 2}, "min_workers=3 is more than max_workers=2"),
        ({"gpus_per_worker": 2, "tensor_parallel": 4}, "each rank has one GPU"),
        ({"block_size": 7}, "--block-size='7'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_cure(arguments: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster.of(arguments)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_flag_that_would_do_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="does nothing on a Ray cluster"):
        Cluster.of({name: "1"})


class Seen:
    """What Serve's autoscaler shows of three workers."""

    target_num_replicas = 2

    def __init__(self, *figures: float) -> None:
        self.aggregated_metrics = {"requests": dict(enumerate(figures))} if figures else {}


@pytest.mark.parametrize(
    ("figures", "wanted"), [((), 2), ((0.0,), 0), ((8.0, 8.0, 0.0), 1), ((8.1, 7.9), 2), ((24.0,), 3)]
)
def test_there_is_a_worker_for_every_so_many_requests(figures: tuple[float, ...], wanted: int) -> None:
    assert Scaling(8)(Seen(*figures)) == (wanted, {})


def test_the_policy_needs_nothing_of_ours_for_serve_pickles_it_alone() -> None:
    code = (
        "import runpy, sys; from pathlib import Path; runpy.run_path(sys.argv[1]); "
        "print([name for name in sys.modules if name.startswith('space_')])"
    )
    words = [sys.executable, "-c", code, inspect.getfile(Scaling)]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_command_prints_a_config_file_that_serve_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=demo", "max_workers=3", "gpus_per_worker=0", "--host", "0.0.0.0"]) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    (application,) = told["applications"]
    assert told["http_options"] == {"host": "0.0.0.0", "port": 8000}
    assert application["import_path"] == "space_router.ray_cluster.app:app"
    assert Cluster.of(application["args"]).max_workers == 3


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 2
    assert "'demo' is no NAME=VALUE" in capsys.readouterr().err
    assert main(["port=80"]) == 2
    assert "`http_options` of the Serve config" in capsys.readouterr().err


def test_the_file_beside_the_images_is_what_the_command_prints() -> None:
    arguments = {"model": "Qwen/Qwen3-8B", "min_workers": "1", "max_workers": "8"}
    file = Path(__file__).parents[3] / "docker/ray.yaml"
    assert file.read_text() == config_file(arguments, host="0.0.0.0", port=8000) + "\n"


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_application_names_the_cure() -> None:
    with pytest.raises(ImportError, match=r"pip install 'spaceserve\[ray\]'"):
        importlib.import_module("space_router.ray_cluster.app")
