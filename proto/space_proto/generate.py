"""Regenerate the stubs: `python -m space_proto.generate [OUT]` (default: beside the protos)."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROTOS = ["worker.proto", "generate.proto"]


def generate(out: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` of every proto into `out`/space_proto."""
    plugin = Path(sys.executable).with_name("protoc-gen-mypy")  # beside this interpreter, on the PATH or not
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{HERE.parent}", f"--python_out={out}", f"--mypy_out={out}",
         f"--plugin=protoc-gen-mypy={plugin}",
         f"--grpc_python_out={out}", *(f"space_proto/{name}" for name in PROTOS)],
        check=True,
    )  # fmt: skip


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent)
