"""Regenerate the stubs: `python -m space_proto.generate [OUT]` (default: beside the protos).

protoc writes into each stub that it runs with its own release of grpcio and protobuf or a later one. Nothing in these
stubs needs that, and images that bring older packages with their torch are many, so it is left out: what pyproject.toml
promises is what they need. To try that is a line: `pip install grpcio==1.80.0 protobuf==6.33.0`, then the tests.
"""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROTOS = ["worker.proto", "generate.proto"]

_GUARDS = (
    r"# Protobuf Python Version: .*\n",
    r"from google\.protobuf import runtime_version as _runtime_version\n",
    r"_runtime_version\.ValidateProtobufRuntimeVersion\((?:.|\n)*?\n\)\n",
    r"import warnings\n",
    r"GRPC_GENERATED_VERSION = (?:.|\n)*?\n    raise RuntimeError\((?:.|\n)*?\n    \)\n\n",
)


def generate(out: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` of every proto into `out`/space_proto."""
    plugin = Path(sys.executable).with_name("protoc-gen-mypy")  # beside this interpreter, on the PATH or not
    subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "grpc_tools.protoc",
            f"-I{HERE.parent}",
            f"--python_out={out}",
            f"--mypy_out={out}",
            f"--plugin=protoc-gen-mypy={plugin}",
            f"--grpc_python_out={out}",
            *(f"space_proto/{name}" for name in PROTOS),
        ],
        check=True,
    )
    for stub in (out / "space_proto").glob("*_pb2*.py"):
        stub.write_text(unguarded(stub.read_text(encoding="utf-8")), encoding="utf-8")


def unguarded(stub: str) -> str:
    """The stub for whatever release it is imported with."""
    for guard in _GUARDS:
        stub = re.sub(guard, "", stub)
    return stub


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent)
