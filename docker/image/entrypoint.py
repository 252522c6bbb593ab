#!/opt/spaceserve/bin/python -P
"""What a container runs: `serve` (the default), `router`, `worker` or any other subcommand of spaceserve.

Flags alone go to `serve`; anything else is run as it is (`docker run -it spaceserve bash`). `healthcheck` asks the
server that the container was started with, or one with the program and flags behind it. The image needs no shell.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

SERVERS = ("serve", "router")
OTHERS = ("doctor", "worker", "workers", "ray", "train", "eval", "bench", "chat", "convert")
HEALTHCHECK = [sys.executable, "-P", "-m", "space_router.commands.healthcheck"]
EVERY_ADDRESS = "0.0.0.0"
"""A container's 127.0.0.1 cannot be reached from outside of it."""


def command(words: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line that a container's words stand for, and its environment."""
    words = list(words)
    if not words or words[0].startswith("-"):
        words.insert(0, "serve")
    program, changed = words[0], dict(environment)
    drop_in = environment.get("SPACESERVE_DROP_IN", "")
    if drop_in == "tgi":  # in the place of TGI's image: its port, and models where it keeps them
        _set_default(changed, "PORT", "80")
        changed["HF_HOME"] = "/data"
    if program in SERVERS and drop_in == "llama.cpp":
        _set_default(changed, "LLAMA_ARG_HOST", EVERY_ADDRESS)
    elif program in SERVERS and drop_in not in ("tgi", "vllm"):  # their default is every address
        _set_default(changed, "SPACESERVE_HOST", EVERY_ADDRESS)
    if program == "healthcheck":
        return [*HEALTHCHECK, *words[1:]], changed
    return (["spaceserve", *words] if program in (*SERVERS, *OTHERS) else words), changed


def _set_default(environment: dict[str, str], name: str, value: str) -> None:
    """Set a variable that is absent or empty."""
    environment[name] = environment.get(name) or value


def main() -> NoReturn:
    """Become the command. Exit codes of one that cannot be run are a shell's: 127 if it is not found, else 126."""
    words, environment = command(sys.argv[1:], os.environ)
    if words[:2] == ["spaceserve", "train"] and importlib.util.find_spec("accelerate") is None:
        _give_up(
            "this image does not train: it has no packages for it. Train where 'docker/install.sh --dev' of the "
            "repository has installed them, and serve OUT/model here.",
            2,
        )
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would what it becomes
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        _give_up(f"{words[0]}: {error.strerror}", 127 if isinstance(error, FileNotFoundError) else 126)


def _give_up(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"entrypoint.py: {message}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
