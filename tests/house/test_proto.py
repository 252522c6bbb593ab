"""The contract between router and worker: the committed stubs are those of the .proto, and every field is explained."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def generated(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    generate = runpy.run_path(str(root / "proto/space_proto/generate.py"), run_name="generate")["generate"]
    generate(out)
    return out / "space_proto"


def test_the_committed_stubs_are_fresh(root: Path, generated: Path) -> None:
    fresh = {file.name: file.read_text() for file in generated.iterdir() if file.suffix in {".py", ".pyi"}}
    assert fresh.keys() >= {"worker_pb2.py", "worker_pb2.pyi", "worker_pb2_grpc.py"}
    stale = [name for name, text in fresh.items() if (root / "proto/space_proto" / name).read_text() != text]
    assert stale == [], "run python proto/space_proto/generate.py"


def test_stubs_and_router_are_imported_with_the_oldest_packages_that_are_promised(root: Path) -> None:
    code = """
from grpc_health.v1 import health_pb2, health_pb2_grpc
import grpc_reflection.v1alpha.reflection  # these check protobuf against what they were made with
for name in ("HealthListRequest", "HealthListResponse"):  # since 1.85
    vars(health_pb2).pop(name, None)
import google.protobuf.runtime_version as protobuf, grpc
protobuf.MAJOR, protobuf.MINOR, protobuf.PATCH = 6, 33, 0
grpc.__version__ = "1.80.0"
from space_proto import generate_pb2, generate_pb2_grpc, worker_pb2, worker_pb2_grpc
import space_router.grpc_api.server
report = worker_pb2.StepReport(sequences=[worker_pb2.SequenceReport(seq_id=7, tokens=[1, 2])])
print(worker_pb2.StepReport.FromString(report.SerializeToString()) == report)
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.stderr) == ("True", "")
    promised = (root / "pyproject.toml").read_text()
    assert '"grpcio>=1.80"' in promised
    assert '"grpcio-health-checking>=1.80"' in promised
    assert '"protobuf>=6.33"' in promised


@pytest.mark.parametrize("kind", ["field", "message", "enum value"])
def test_everything_in_the_contract_has_a_comment(root: Path, kind: str) -> None:
    pattern = {
        "field": re.compile(r"^\s+(?:repeated |optional )?[\w.<>, ]+ (\w+) = \d+;"),
        "message": re.compile(r"^(?:message|service|enum) (\w+) \{"),
        "enum value": re.compile(r"^\s+([A-Z][A-Z0-9_]+) = \d+;"),
    }[kind]
    silent, seen = [], 0
    for proto in sorted((root / "proto/space_proto").glob("*.proto")):
        above = ""
        for line in proto.read_text().splitlines():
            if match := pattern.match(line):
                seen += 1
                if "//" not in line and not above.strip().startswith("//"):
                    silent.append(f"{proto.name}: {match[1]}")
            above = line
    assert seen
    assert silent == []
