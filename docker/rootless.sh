#!/usr/bin/env bash
# Build the CPU image from docker/cpu.Dockerfile as it is, without root or a container engine's daemon, and try it.
#
#   docker/rootless.sh [FOLDER]      not as root, on Linux; some minutes and 8 GB
#
# It needs podman, runc, uidmap, mmdebstrap (apt-get install) and a range in /etc/subuid and /etc/subgid for the user.
# Images come from no hub: the base is a new Debian root with its own python3, unless BASE names another image.
# The image is started as docker/compose.yaml starts it: root read-only, /tmp a tmpfs, no capabilities, its own user. Its
# health check must call it ready, it must answer a question to the default model with the network off, and SIGTERM must end it.
# With a FOLDER, images are kept there: podman --root FOLDER/images --runroot FOLDER/run images.
#
# Environment: BASE; MIRROR, SUITE of Debian; PIP_* of this shell are pip's in there, and BIND names folders to be seen there.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MIRROR=${MIRROR:-http://deb.debian.org/debian}
SUITE=${SUITE:-bookworm}

fail() {
    printf '%s\n' "rootless: $*" >&2
    exit 1
}
say() { printf '%s\n' "rootless: $*"; }

[ "$(id -u)" != 0 ] || fail "root has docker/clean_root.sh; run this as another user."
for program in podman runc newuidmap mmdebstrap; do
    command -v "$program" >/dev/null || fail "$program is missing: apt-get install podman runc uidmap mmdebstrap."
done
for file in /etc/subuid /etc/subgid; do # the image's user is 10001
    grep -qE "^($(id -un)|$(id -u)):[0-9]+:[0-9]{5,}$" "$file" 2>/dev/null ||
        fail "$file has no range of ids for $(id -un): usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $(id -un)."
done

if [ $# -gt 0 ]; then
    mkdir -p "$1"
    top=$(cd "$1" && pwd)
else
    top=$(mktemp -d)
    made=$top
fi
# Overlays of the kernel itself: copies of every layer would take 25 GB.
engine() { podman --root "$top/images" --runroot "$top/run" --storage-driver overlay --cgroup-manager cgroupfs --runtime runc "$@"; }
leave() {
    engine rm --force --volumes --time 0 spaceserve-tried >/dev/null 2>&1 || true
    if [ -n "${made:-}" ]; then
        engine system reset --force >/dev/null 2>&1 || true
        podman unshare rm -rf "$made"
    fi
}
trap leave EXIT

seen=()
if [ -f /etc/ssl/certs/ca-certificates.crt ]; then seen+=(--volume /etc/ssl/certs/ca-certificates.crt:/etc/ssl/certs/ca-certificates.crt:ro); fi
for folder in ${BIND:-}; do seen+=(--volume "$folder:$folder:ro"); done
# pip's variables become its configuration: a build sees no variable that the Dockerfile does not name.
{
    echo "[global]"
    env | sed -n 's/^PIP_\([A-Z_]*\)=/\1 = /p' | awk -F' = ' '{ name = tolower($1); gsub(/_/, "-", name); print name " = " substr($0, length($1) + 4) }'
} >"$top/pip.conf"
seen+=(--volume "$top/pip.conf:/etc/pip.conf:ro")

if [ -z "${BASE:-}" ]; then
    BASE=localhost/debian-python:$SUITE
    if ! engine image exists "$BASE"; then
        say "a new Debian $SUITE, as $BASE"
        mmdebstrap --quiet --mode=unshare --variant=minbase --include=python3,python3-venv,ca-certificates "$SUITE" "$top/base.tar" "$MIRROR" ||
            fail "mmdebstrap made no Debian $SUITE from $MIRROR."
        engine import --quiet "$top/base.tar" "$BASE" >/dev/null
        rm "$top/base.tar"
    fi
fi
say "building docker/cpu.Dockerfile on $BASE"
# podman knows --start-interval of health checks from 4.8 on only.
sed 's/ --start-interval=[^ ]*//' "$ROOT/docker/cpu.Dockerfile" >"$top/cpu.Dockerfile"
# Docker's format: OCI's has no health check. The ids of layers in between would be kept as often as the image changes.
engine build --isolation chroot --format docker --layers=false --build-arg BASE="$BASE" "${seen[@]}" \
    --file "$top/cpu.Dockerfile" --tag spaceserve-cpu "$ROOT" || fail "the image was not built."

say "starting it: read-only root, user $(engine image inspect --format '{{.Config.User}}' spaceserve-cpu)"
engine run --detach --name spaceserve-tried --network none --no-healthcheck \
    --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --volume spaceserve-data:/data \
    --env SPACESERVE_OFFLINE=on spaceserve-cpu >/dev/null || fail "it was not started."
inside() { engine exec spaceserve-tried "$@"; }
# podman's own timer for health checks needs systemd, so the image's command is run here.
health=$(engine image inspect --format '{{range .Config.Healthcheck.Test}}{{println .}}{{end}}' spaceserve-cpu)
[ "$(head -1 <<<"$health")" = CMD ] || fail "the image has no health check that needs no shell: $health"
mapfile -t health < <(sed '1d; /^$/d' <<<"$health")
for _ in $(seq 120); do
    if inside "${health[@]}" 2>/dev/null; then ready=yes && break; fi
    [ "$(engine container inspect --format '{{.State.Running}}' spaceserve-tried)" = true ] || break
    sleep 1
done
if [ -z "${ready:-}" ]; then
    engine logs spaceserve-tried
    fail "the health check never called it ready."
fi
if inside python -c 'open("/opt/spaceserve/x", "w")' 2>/dev/null; then fail "the root is not read-only."; fi
inside python -c "
import json, os, urllib.request
body = {'model': 'smollm2', 'messages': [{'role': 'user', 'content': 'Why is the sky blue?'}], 'max_tokens': 16, 'temperature': 0}
asked = urllib.request.Request('http://127.0.0.1:8080/v1/chat/completions', json.dumps(body).encode(), {'content-type': 'application/json'})
answer = json.load(urllib.request.urlopen(asked, timeout=60))
print('rootless: user', os.getuid(), 'gets', repr(answer['choices'][0]['message']['content']), 'in', answer['spaceserve']['steps'], 'steps')
"
engine stop --time 60 spaceserve-tried >/dev/null
code=$(engine container inspect --format '{{.State.ExitCode}}' spaceserve-tried)
[ "$code" = 0 ] || fail "the server ended with code $code after SIGTERM."
say "done: spaceserve-cpu, $(engine image inspect --format '{{.Size}}' spaceserve-cpu | numfmt --to=iec)"
