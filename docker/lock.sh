#!/usr/bin/env bash
# Renew docker/locks/run.txt, dev.txt and ray.txt from pyproject.toml, for every platform at once, with hashes.
#
#   docker/lock.sh              keep the pinned versions where pyproject.toml still allows them
#   docker/lock.sh --upgrade    take the newest versions that pyproject.toml allows
set -euo pipefail
cd "$(dirname "$0")/.."

uv=${UV:-.venv/bin/uv}
[ -x "$uv" ] || { echo "lock.sh: $uv is missing; run docker/install.sh --dev first, or set UV." >&2; exit 1; }

# torch is in pyproject.toml but must not be in the locks (see docker/locks/run.in): this override never applies.
override=$(mktemp)
trap 'rm -f "$override"' EXIT
echo "torch ; python_version < '3'" >"$override"

compile() {
    out=$1
    shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links --override "$override" --output-file "$out" \
        pyproject.toml docker/locks/run.in "$@" >/dev/null
    echo "$out: $(grep -c == "$out") packages"
}

compile docker/locks/run.txt --extra tracing "$@"
compile docker/locks/dev.txt --extra train --extra dev --constraint docker/locks/run.txt "$@"
compile docker/locks/ray.txt --extra tracing --extra ray --constraint docker/locks/run.txt "$@"
