#!/usr/bin/env bash
# Install spaceserve into a virtual environment of its own. `make`, the Dockerfiles and the tests all run this script.
#
#   docker/install.sh            what serving needs
#   docker/install.sh --dev      and what testing and training need
#
# Four stages, in this order; each says what it does and is skipped when nothing has to be done:
#   environment    python -m venv
#   torch          the CPU build where there is no NVIDIA GPU, else the CUDA build   (docker/locks/torch.txt)
#   dependencies   every other package, pinned and hashed                            (docker/locks/run.txt or dev.txt)
#                  and zig where there is no C++ compiler                            (docker/locks/compiler.txt)
#   project        spaceserve itself
# It may be interrupted at any time: the next run repairs what was left half done.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
LOCKS=$ROOT/docker/locks

usage() {
    cat <<'USAGE'
usage: docker/install.sh [--dev] [--gpu] [--device auto|cpu|cuda] [--venv PATH] [--stages "NAME ..."] [--no-editable]

  --dev            add what testing and training need
  --gpu            add optional GPU packages (flash-attn: built from source, needs a CUDA toolkit)
  --device D       which build of torch; auto takes cuda where an NVIDIA GPU is present    (default: auto)
  --venv PATH      where the virtual environment is or shall be    (default: .venv in the repository, or SPACESERVE_VENV)
  --stages "..."   run only these of: environment torch dependencies project    (images cache them layer by layer)
  --no-editable    copy the packages instead of linking to this folder

Environment:
  PYTHON                   interpreter to build the environment from    (default: the newest supported python3 found)
  SPACESERVE_TORCH_INDEX   package index with torch's CPU builds    (default: https://download.pytorch.org/whl/cpu)
USAGE
}

say() { printf '%s\n' "install: $*"; }
fail() {
    stop_if_interrupted
    printf '%s\n' "install: $*" >&2
    exit 1
}

# A trap that exits is not safe everywhere: bash 5.2, signalled while it starts a pipeline, leaves without its EXIT trap.
# So the trap notes the signal, and this is called wherever something may have ended because of it.
interrupted=false
stop_if_interrupted() { if $interrupted; then exit 130; fi; }

dev=false gpu=false editable=true device=auto venv=${SPACESERVE_VENV:-$ROOT/.venv} stages=""
while [ $# -gt 0 ]; do
    case $1 in
        --dev) dev=true ;;
        --gpu) gpu=true ;;
        --no-editable) editable=false ;;
        --device | --venv | --stages)
            [ $# -ge 2 ] || fail "$1 needs a value; see docker/install.sh --help."
            case $1 in
                --device) device=$2 ;;
                --venv) venv=$2 ;;
                --stages) stages=$2 ;;
            esac
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) fail "unknown argument '$1'; see docker/install.sh --help." ;;
    esac
    shift
done
case $device in auto | cpu | cuda) ;; *) fail "--device is '$device'; it must be auto, cpu or cuda." ;; esac
for stage in $stages; do
    case $stage in
        environment | torch | dependencies | project) ;;
        *) fail "--stages names '$stage'; the stages are environment, torch, dependencies and project." ;;
    esac
done
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac

if [ "$device" = auto ]; then
    device=cpu
    if [ -e /dev/nvidia0 ] || { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }; then
        device=cuda
    fi
fi
lock=$LOCKS/run.txt
if $dev; then lock=$LOCKS/dev.txt; fi
own_lock=""
if $dev && [ "$device" = cuda ]; then # torch's CUDA build brings the triton that it was built with
    own_lock=$(mktemp)
    awk '/^[^ ]/ { skip = /^triton==/ } !skip' "$lock" >"$own_lock"
    lock=$own_lock
fi
python=$venv/bin/python

# ---------------------------------------------------------------------------------------------- what is there already

# Everything that decides what gets installed, in one number.
fingerprint() {
    {
        cat "$ROOT/docker/install.sh" "$ROOT/pyproject.toml" "$LOCKS/torch.txt" "$LOCKS/compiler.txt" "$LOCKS/$1.txt"
        echo "$ROOT $venv $device $gpu $editable $("$python" -V 2>&1)"
    } | cksum
}

# Stamps are written last, so an environment without one is unfinished. A dev environment serves as well.
is_complete() {
    [ -x "$python" ] || return 1
    local profile=run
    if $dev; then profile=dev; fi
    [ "$(cat "$venv/.installed-$profile" 2>/dev/null)" = "$(fingerprint $profile)" ] || return 1
    "$python" -I "$LOCKS/installed.py" --device "$device" --project "$LOCKS/torch.txt" "$lock"
}

# Compiling every module takes as long as everything else. Where the environment stays writable, Python compiles what is
# imported, once; images, which name stages, are compiled whole, as their root may be read-only.
if [ -z "$stages" ]; then export PIP_COMPILE=0; fi

# pip, with its complaints kept for the case that it fails.
pip() {
    local status=0
    "$python" -P -m pip --disable-pip-version-check --no-input "$@" 2>"$log" || status=$?
    stop_if_interrupted
    return $status
}

# One line per package becomes one counter.
count_to() {
    local live=false
    if [ -t 1 ]; then live=true; fi
    awk -v total="$1" -v live=$live '
        /^ *Collecting |^Requirement already satisfied: / {
            name = $2 == "already" ? $4 : $2
            sub(/[=<>;].*/, "", name)
            count++
            if (live == "true") { printf "\r\033[K         %d of %d: %s", count, total, name; fflush() }
            else if (count % 20 == 0) { print "         " count " of " total; fflush() }
        }
        /^Installing collected packages/ {
            if (live == "true") printf "\r\033[K"
            print "         unpacking"; fflush()
        }
        END { if (live == "true") printf "\r\033[K" }'
}

# A stage that was interrupted may have left packages that only look installed: they are installed once more.
begin() {
    stop_if_interrupted
    again=""
    if [ -e "$venv/.installing-$1" ]; then again=--force-reinstall; fi
    : >"$venv/.installing-$1"
}
end() { rm -f "$venv/.installing-$1"; }

# ------------------------------------------------------------------------------------------------------- the stages

supported() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with venv was found (python3 is: $(python3 -V 2>&1 || true)).
         Debian, Ubuntu: apt-get install python3 python3-venv    macOS: brew install python@3.12
         elsewhere: python.org/downloads    or name one: PYTHON=/path/to/python3.12 make serve"
}

stage_environment() {
    if [ -x "$python" ] && supported "$python" && "$python" -P -m pip --version >/dev/null 2>&1 && [ ! -e "$venv/.installing-environment" ]; then
        return
    fi
    local base
    base=$(find_python)
    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ ! -e "$venv/.installing-environment" ] && [ -n "$(ls -A "$venv")" ]; then
        fail "$venv exists and is not a virtual environment; move it away or choose another with --venv."
    fi
    say "creating $venv from $base ($("$base" -V 2>&1))"
    rm -rf "$venv"
    mkdir -p "$venv"
    : >"$venv/.installing-environment"
    "$base" -P -m venv "$venv"
    end environment
}

stage_torch() {
    if [ ! -e "$venv/.installing-torch" ] && "$python" -I "$LOCKS/installed.py" --device "$device" "$LOCKS/torch.txt" >/dev/null; then
        return
    fi
    local torch index
    torch=$(grep '^torch==' "$LOCKS/torch.txt")
    index=${SPACESERVE_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
    begin torch
    if [ "$device" = cpu ] && [ "$(uname -s)" = Linux ]; then
        # The CPU build is a tenth of the download. An index that cannot be reached costs seconds, not minutes.
        say "torch: the CPU build, from the configured package index"
        if pip install $again --no-deps --retries 1 --timeout 15 "$torch+cpu"; then
            end torch
            return
        fi
        say "torch: not there; the CPU build, from $index"
        if pip install $again --no-deps --retries 0 --timeout 10 --index-url "$index" "$torch+cpu"; then
            end torch
            return
        fi
        say "torch: not there either; the default build, which is larger"
    else
        say "torch: the default build for $device"
    fi
    pip install $again "$torch" || fail "torch could not be installed; pip says:
$(cat "$log")
         Is the package index reachable? Behind a proxy set HTTPS_PROXY; for a mirror set PIP_INDEX_URL."
    end torch
}

# The compilers that space_kernels.build.compiler looks for.
has_compiler() {
    local name
    for name in ${CXX:-c++} g++ clang++; do
        if command -v "$name" >/dev/null 2>&1; then return 0; fi
    done
    return 1
}

stage_dependencies() {
    if [ ! -e "$venv/.installing-dependencies" ] && "$python" -I "$LOCKS/installed.py" "$lock" >/dev/null; then
        return
    fi
    local total
    total=$(grep -c == "$lock")
    begin dependencies
    say "dependencies: $total packages of $(basename "$lock"), each checked against its hash"
    pip install $again --no-deps --require-hashes --progress-bar off -r "$lock" | count_to "$total" || fail "the dependencies could not be installed; pip says:
$(cat "$log")
         Run it again when the package index is reachable. Behind a proxy set HTTPS_PROXY; for a mirror set PIP_INDEX_URL."
    end dependencies
    if [ -z "$stages" ] && [ "$device" = cpu ] && [ "$(uname -s)" = Linux ] && ! has_compiler; then
        say "dependencies: there is no C++ compiler here, so zig (a 100 MB package) will build the CPU operations at the
         first start, in some minutes. \`apt install g++\` is smaller and builds them in seconds."
        pip install --quiet --no-deps --require-hashes -r "$LOCKS/compiler.txt" || say "note: zig could not be installed. \
Without a C++ compiler a small model is about three times slower: apt install g++"
    fi
    if $gpu; then
        say "dependencies: optional GPU packages, built from source: this can take half an hour"
        # Unquoted on purpose: one word per package.
        # shellcheck disable=SC2046
        pip install --no-build-isolation $("$python" -P -c 'import sys, tomllib
extras = tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"]
print(*(line.split(";")[0].replace(" ", "") for line in extras["gpu"]))' "$ROOT/pyproject.toml") || fail "the GPU packages could not be installed; pip says:
$(cat "$log")
         They are optional: leave out --gpu."
    fi
}

stage_project() {
    begin project
    say "project: spaceserve"
    local link=""
    if $editable; then link=--editable; fi
    pip install --quiet --force-reinstall --no-deps --no-build-isolation $link "$ROOT" || fail "spaceserve itself could not be installed; pip says:
$(cat "$log")"
    end project
}

# ----------------------------------------------------------------------------------------------------------- the run

log=$(mktemp)
lockdir=$venv.lock
locked=""
leave() {
    local status=$?
    trap '' INT TERM # a signal to the group may come again, or to this process last
    rm -rf "$log" "$own_lock" "$locked"
    case $status in
        130 | 143) # 143: what ran when the signal came ended of it, and `set -e` ended this
            { printf "\n" && say "interrupted; run it again to go on."; } || true
            exit 130
            ;;
    esac
}
trap leave EXIT
trap 'interrupted=true' INT TERM

if [ -z "$stages" ] && is_complete >/dev/null; then
    exit 0
fi

# Two installs at once (`make serve` beside `make test`) would undo each other.
mkdir -p "$(dirname "$venv")"
until mkdir "$lockdir" 2>/dev/null; do
    stop_if_interrupted
    owner=$(cat "$lockdir/pid" 2>/dev/null || true)
    if [ -n "$owner" ] && ! kill -0 "$owner" 2>/dev/null; then
        rm -rf "$lockdir"
        continue
    fi
    say "waiting for another install (process ${owner:-unknown}, $lockdir)"
    sleep 2
done
echo $$ >"$lockdir/pid"
locked=$lockdir

started=$SECONDS
if [ -x "$python" ]; then rm -f "$venv"/.installed-*; fi
for stage in ${stages:-environment torch dependencies project}; do
    stop_if_interrupted
    "stage_$stage"
done
stop_if_interrupted
if [ -z "$stages" ]; then
    "$python" -I "$LOCKS/installed.py" --device "$device" --project "$LOCKS/torch.txt" "$lock" ||
        fail "the environment is not what the locks say; remove $venv and run this again."
    pip check >/dev/null || say "note: pip check finds packages that do not fit each other; run $python -m pip check."
    fingerprint run >"$venv/.stamp"
    cp "$venv/.stamp" "$venv/.installed-run"
    if $dev; then
        fingerprint dev >"$venv/.stamp"
        cp "$venv/.stamp" "$venv/.installed-dev"
    fi
    rm -f "$venv/.stamp"
fi
say "ready after $((SECONDS - started)) s: $venv ($device)"
