#!/usr/bin/env bash
# The CPU image's own steps in a new Debian root, without a container engine: what it would hold, and that it serves.
#
#   docker/clean_root.sh [FOLDER]      as root, on Linux, with debootstrap (apt-get install debootstrap); some minutes
#
# Every COPY, RUN and ENV is read from docker/cpu.Dockerfile and done as written, in one root for both stages; only the
# base is another (Debian with its own python3, not python:3.12-slim), and the caches of RUN --mount are left out. Then the
# server runs as the image's user with the root mounted read-only, /tmp a tmpfs and /data writable, no shell, and may fetch nothing;
# the image's health check must call it ready, and it must answer a question to the default model.
#
# Environment: MIRROR, SUITE of Debian; PIP_* of this shell are pip's in there, and BIND names folders to be seen there.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DOCKERFILE=$ROOT/docker/cpu.Dockerfile
MIRROR=${MIRROR:-http://deb.debian.org/debian}
SUITE=${SUITE:-bookworm}

fail() {
    printf '%s\n' "clean_root: $*" >&2
    exit 1
}
say() { printf '%s\n' "clean_root: $*"; }

[ "$(id -u)" = 0 ] || fail "chroot and mounts need root; run it with sudo."
command -v debootstrap >/dev/null || fail "debootstrap is missing: apt-get install debootstrap."
# Mounts of a namespace of its own end with it, however this ends.
[ -n "${IN_NAMESPACE:-}" ] || exec env IN_NAMESPACE=1 unshare --mount --propagation private "$0" "$@"

if [ $# -gt 0 ]; then
    top=$1
    mkdir -p "$top"
else
    top=$(mktemp -d)
    made=$top
fi
new=$top/root
server="" made=${made:-}
leave() {
    if [ -n "$server" ]; then kill -KILL "$server" 2>/dev/null || true; fi
    if [ -n "$made" ]; then
        umount --recursive --lazy "$new" 2>/dev/null || true
        rm -rf --one-file-system "$made"
    fi
}
trap leave EXIT
if [ ! -x "$new/usr/bin/python3" ]; then
    say "a new Debian $SUITE"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$SUITE" "$new" "$MIRROR" >"$top/debootstrap.log" ||
        fail "debootstrap failed; $top/debootstrap.log says why."
fi

mount --bind "$new" "$new"
mount -t proc proc "$new/proc"
mount --rbind /dev "$new/dev"
cp -L /etc/resolv.conf "$new/etc/resolv.conf" # the image's build has the machine's names, too
mkdir -p "$new/etc/ssl/certs"
if [ -f /etc/ssl/certs/ca-certificates.crt ]; then
    cp -L /etc/ssl/certs/ca-certificates.crt "$new/etc/ssl/certs/ca-certificates.crt"
fi
for folder in ${BIND:-}; do
    mkdir -p "$new$folder"
    mount --bind "$folder" "$new$folder"
    mount -o remount,bind,ro "$new$folder"
done

kept=()
while IFS= read -r one; do kept+=("$one"); done < <(env | grep -E '^(PIP_|HTTPS?_PROXY|https?_proxy|NO_PROXY|no_proxy|SSL_CERT|REQUESTS_CA)' || true)
variables=("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" "HOME=/root")

inside() { chroot "$new" /usr/bin/env -i "${variables[@]}" "${kept[@]}" "$@"; }

copy() { # [--chmod=MODE] SOURCE... PLACE
    local mode="" words=()
    for word in "$@"; do
        case $word in
            --chmod=*) mode=${word#--chmod=} ;;
            --from=*) return ;; # one root holds both stages
            *) words+=("$word") ;;
        esac
    done
    local place=${words[-1]} source
    unset 'words[-1]'
    case $place in /*) ;; *) place=$folder_in/$place ;; esac
    for source in "${words[@]}"; do
        if [ -d "$ROOT/$source" ]; then
            mkdir -p "$new$place"
            (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard -- "$source" | tar -c --null -T - -f -) |
                tar -x -C "$new$place" --strip-components="$(awk -F/ '{print NF}' <<<"$source")" -f -
        elif [ "${place%/}" != "$place" ] || [ -d "$new$place" ]; then
            mkdir -p "$new$place"
            cp "$ROOT/$source" "$new$place"
        else
            mkdir -p "$new$(dirname "$place")"
            cp "$ROOT/$source" "$new$place"
            if [ -n "$mode" ]; then chmod "$mode" "$new$place"; fi
        fi
        if [ -n "$mode" ] && [ -f "$new$place/$(basename "$source")" ]; then chmod "$mode" "$new$place/$(basename "$source")"; fi
    done
}

folder_in=/
user=0
while IFS= read -r line; do
    word=${line%% *} rest=${line#* }
    case $word in
        FROM | ARG | VOLUME | EXPOSE | HEALTHCHECK | ENTRYPOINT | CMD) ;;
        WORKDIR) folder_in=$rest && mkdir -p "$new$rest" ;;
        USER) user=$rest ;;
        ENV) read -ra words <<<"${rest//\$PATH/${variables[0]#PATH=}}" && variables+=("${words[@]}") ;;
        COPY)
            read -ra words <<<"$rest"
            copy "${words[@]}"
            ;;
        RUN)
            command=$(sed -E 's/--mount=[^ ]+ *//g' <<<"$rest")
            say "RUN $command"
            inside sh -c "cd $folder_in && $command"
            ;;
        *) fail "docker/cpu.Dockerfile has an instruction that this script does not know: $word." ;;
    esac
done < <(sed -E '/^[[:space:]]*#/d; /^[[:space:]]*$/d' "$DOCKERFILE" | sed -E ':a; /\\$/{N; s/\\\n[[:space:]]*/ /; ba}')

say "the server, as user $user, on a root that is mounted read-only"
mount --bind "$new/data" "$new/data"
mount -t tmpfs tmpfs "$new/tmp"
mount -o remount,bind,ro "$new"
as_user() { chroot "${words[@]}" "$@"; }
PORT=$(inside python3 -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
words=(--userspec="$user:$user" "$new" /usr/bin/env -i "${variables[@]}" HOME=/data SPACESERVE_PORT="$PORT" SPACESERVE_OFFLINE=on)
if as_user sh -c 'echo x >/opt/spaceserve/x' 2>/dev/null; then fail "the root is not read-only."; fi
for shell in sh dash bash; do # the image runs without one
    if [ -e "$new/bin/$shell" ]; then mount --bind /dev/null "$new/bin/$shell"; fi
done
if as_user sh -c true 2>/dev/null; then fail "there still is a shell."; fi
chroot "${words[@]}" env -C /data entrypoint.py >"$top/server.log" 2>&1 &
server=$!
for _ in $(seq 120); do
    if as_user entrypoint.py healthcheck serve 2>/dev/null; then ready=yes && break; fi
    kill -0 "$server" 2>/dev/null || break
    sleep 1
done
if [ -z "${ready:-}" ]; then
    cat "$top/server.log"
    fail "the health check never called it ready."
fi
kill -0 "$server" || fail "somebody else answers on port $PORT; the server has ended: $(tail -1 "$top/server.log")"
as_user python -c "
import json, urllib.request
body = {'model': 'smollm2', 'messages': [{'role': 'user', 'content': 'Why is the sky blue?'}], 'max_tokens': 16, 'temperature': 0}
asked = urllib.request.Request('http://127.0.0.1:$PORT/v1/chat/completions', json.dumps(body).encode(), {'content-type': 'application/json'})
told = json.load(urllib.request.urlopen(asked, timeout=60))
print('clean_root: it answers', repr(told['choices'][0]['message']['content']), 'in', told['spaceserve']['steps'], 'steps')
"
as_user spaceserve doctor --port 0 >"$top/doctor.log" || { cat "$top/doctor.log" && fail "doctor says that it would not start."; }
say "$(tail -1 "$top/doctor.log")"
kill -TERM "$server"
wait "$server" || fail "the server ended with code $? after SIGTERM."
server=""
say "kept in /data: $(cd "$new/data" && find . -type f | head -5 | tr '\n' ' ')"
[ -z "$(find "$new/data" -name '*.gguf')" ] || fail "the default model was fetched into /data."
say "done: $(du -sh --one-file-system "$new/opt/spaceserve" | cut -f1) in /opt/spaceserve"
