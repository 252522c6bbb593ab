"""The `spaceserve` command, with a subcommand for each installed program."""

import argparse
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from space_common.process import log_to_stderr, module_command, quieten_grpc, report_error, safe_environment

from space_router.commands.programs import PROGRAMS, Program
from space_router.config import ENVIRONMENT_PREFIX, ServeConfig, build, flag_of, settings
from space_router.errors import ConfigError
from space_router.foreign_flags.command_line import translate
from space_router.setting import Setting, help_texts

_SERVE_EXAMPLES = """\
examples:
  spaceserve serve                                         SmolLM2-135M-Instruct on http://127.0.0.1:8080
  spaceserve serve --model demo                            a tiny Python-code model: nothing is downloaded
  spaceserve serve --model ./my-checkpoint --port 9000     a folder with config.json, tokenizer.json, safetensors
  SPACESERVE_PORT=9000 spaceserve serve                    every flag is also an environment variable
  spaceserve serve --model PATH --space-mask-ids 32002 --space-num-masks 5 --chat-template vicuna
                                                           a published SPACE checkpoint as it is
  spaceserve serve Qwen/Qwen3-8B --max-num-seqs 32         flags of vLLM, TGI and llama-server are translated
  spaceserve serve --adapter code=./code-adapter           drafts for requests with "model": "code"; the same text
  spaceserve serve --speculation off                       plain decoding: the same text, one token per step
  spaceserve serve --grpc-port 50051                       gRPC beside HTTP: spaceserve.v1.Generate, health, reflection
"""

_ROUTER_EXAMPLES = """\
example:
  spaceserve worker --model PATH --listen 0.0.0.0:9100 --worker-secret-file FILE     on the machine with the accelerator
  spaceserve router --model PATH --worker-address gpu1:9100 --worker-secret-file FILE
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 after a normal end, 1 after a failure, 2 for invalid flags or settings."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    programs = {name: program for name, program in PROGRAMS.items() if program.exists}
    if arguments and arguments[0] in programs:
        _become(programs[arguments[0]].module, arguments[1:])
    environment: Mapping[str, str] = os.environ
    notices: tuple[str, ...] = ()
    if arguments and arguments[0] in _FLAGS_OF:
        try:
            names = [name for name, (_, known) in settings().items() if _has(arguments[0], known)]
            translated = translate(arguments[1:], environment, names, _FLAGS_OF[arguments[0]])
        except ConfigError as error:
            report_error("spaceserve", str(error))
            return 2
        arguments[1:], environment, notices = translated.arguments, translated.environment, translated.notices
    options = _parser(programs).parse_args(arguments)
    flags = {name: _text(getattr(options, name, None)) for name in settings()}
    if options.command == "doctor":
        from space_router.commands.doctor import run

        return run(flags, environment, as_json=options.json)
    as_json = "json" in (flags.get("log_format"), environment.get(f"{ENVIRONMENT_PREFIX}LOG_FORMAT"))
    quieten_grpc(logs_json=as_json)
    if as_json:
        log_to_stderr("info", "json")  # for errors in the flags, too
    try:
        config = replace(build(flags, environment), notices=notices)
        if options.command == "router" and not config.worker_address:
            raise ConfigError("--worker-address is needed: `spaceserve router` starts no workers; `serve` does.")
        return _serve(config)
    except ConfigError as error:
        report_error("spaceserve", str(error))
        return 2


_FLAGS_OF = {"serve": ("--help", "-h"), "router": ("--help", "-h"), "doctor": ("--help", "-h", "--json")}
"""Commands with a flag for each setting; their flags without a value."""


def _has(command: str, known: Setting) -> bool:
    """Whether a command has a setting's flag."""
    return command != "router" or not known.own_workers


def _text(given: str | list[str] | None) -> str | None:
    """Return a flag's text; repeated values are joined by commas, as in the environment variable."""
    return ",".join(given) if isinstance(given, list) else given


def _serve(config: ServeConfig) -> int:
    from space_router.serve import run  # imported late, so that --help is fast

    return run(config)


def _become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process, so that signals and exit codes are the program's own."""
    os.execve(sys.executable, module_command(module, *arguments), safe_environment())


def _parser(programs: Mapping[str, Program]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve",
        description="Serves language models with SPACE decoding: one model drafts and verifies in the same forward "
        "pass, and the text is exactly what plain decoding gives.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_command = partial(commands.add_parser, formatter_class=_Teaching, allow_abbrev=False)
    serve = add_command(
        "serve",
        help="serve a model over HTTP: router and workers on this machine",
        description="Starts workers and serves OpenAI's and TGI's HTTP API, and with --grpc-port the same over gRPC.",
        epilog=_SERVE_EXAMPLES,
    )
    router = add_command(
        "router",
        help="serve over HTTP with workers that run elsewhere",
        description="The front half alone: HTTP, queue, pages; the workers are at --worker-address.",
        epilog=_ROUTER_EXAMPLES,
    )
    doctor = add_command(
        "doctor",
        help="would the server start here with these flags? facts and cures on one page",
        description="Looks at environment, GPU and driver, kernels, model, memory and ports, with the flags of `serve`,"
        " and starts nothing. The exit code is 0 where the server would start, else 1.",
    )
    doctor.add_argument("--json", action="store_true", help="the same for programs")
    _add_flags(doctor, own_workers=True)
    _add_flags(serve, own_workers=True)
    _add_flags(router, own_workers=False)
    for name, program in programs.items():
        commands.add_parser(name, help=program.help, add_help=False)
    return parser


def _add_flags(parser: argparse.ArgumentParser, *, own_workers: bool) -> None:
    """Add a flag for every setting; `own_workers`: include those of workers that are started here."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    texts = help_texts(ServeConfig)
    for name, (field, known) in settings().items():
        if known.own_workers and not own_workers:
            continue
        if known.group not in groups:
            groups[known.group] = parser.add_argument_group(known.group)
        default = "none" if field.default in (None, ()) else field.default
        shown = f"{texts[name]}. [default: {default}; {ENVIRONMENT_PREFIX}{name.upper()}]"
        groups[known.group].add_argument(
            flag_of(name),
            action="append" if known.repeatable else "store",
            dest=name,
            metavar=known.metavar,
            help=shown.replace("%", "%%"),
        )


class _Teaching(argparse.RawDescriptionHelpFormatter):
    """Keeps the examples as written, wraps other text, and separates flags by an empty line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6, width=100)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [*textwrap.wrap(text, width), ""]


if __name__ == "__main__":
    sys.exit(main())
