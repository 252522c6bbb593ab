#!/bin/sh
# What a container runs: `serve` (the default), `router`, `worker` or any other subcommand of spaceserve; flags alone
# go to `serve`; anything else is run as it is (`docker run -it spaceserve bash`). `healthcheck` asks the server that the
# container was started with, or one with the program and flags behind it.
set -eu

if [ $# -eq 0 ]; then set -- serve; fi
case $1 in
    -*) set -- serve "$@" ;;
esac

# In the place of TGI's image: its port, and models where it keeps them.
if [ "${SPACESERVE_DROP_IN:-}" = tgi ]; then export PORT="${PORT:-80}" HF_HOME=/data; fi

case $1 in
    serve | router)
        # Inside a container 127.0.0.1 is reachable by nobody.
        case ${SPACESERVE_DROP_IN:-} in
            tgi | vllm) ;;  # their default is every address
            llama.cpp) export LLAMA_ARG_HOST="${LLAMA_ARG_HOST:-0.0.0.0}" ;;
            *) export SPACESERVE_HOST="${SPACESERVE_HOST:-0.0.0.0}" ;;
        esac
        exec spaceserve "$@"
        ;;
    train)
        if ! python -P -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("accelerate"))'; then
            echo "entrypoint.sh: this image does not train: it has no packages for it. Train where" \
                "'docker/install.sh --dev' of the repository has installed them, and serve OUT/model here." >&2
            exit 2
        fi
        exec spaceserve "$@"
        ;;
    doctor | worker | workers | ray | eval | bench | chat | convert)
        exec spaceserve "$@"
        ;;
    healthcheck)
        shift
        exec python -P -m space_router.commands.healthcheck "$@"
        ;;
    *)
        exec "$@"
        ;;
esac
