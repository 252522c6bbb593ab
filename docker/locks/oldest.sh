#!/usr/bin/env bash
# An environment with the oldest packages that pyproject.toml allows for serving; torch and what tests need are as pinned.
#
#   docker/locks/oldest.sh VENV
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:?usage: docker/locks/oldest.sh VENV}

docker/install.sh --dev --venv "$venv"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo "torch ; python_version < '3'" >"$folder/override"  # its build is this machine's: it stays
"$venv/bin/uv" pip compile --quiet --python "$venv/bin/python" --resolution lowest-direct --override "$folder/override" \
    --no-header --no-annotate --output-file "$folder/oldest.txt" pyproject.toml >/dev/null
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps -r "$folder/oldest.txt"
sed 's/^/oldest: /' "$folder/oldest.txt"
