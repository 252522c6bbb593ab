"""Compile and render chat templates in Jinja's sandbox; `main` does so in a process of bounded time and memory.

What is counted stops most wasteful templates early, with a message that names the reason. The bounds that hold for
every template are those of the process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
from jinja2 import Environment, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from space_router.text import written_numbers
from space_router.text.template_messages import (
    READY,
    AnswerKind,
    TemplateAnswer,
    TemplateJob,
    TemplateLimits,
    read_job,
    write_answer,
)

MAX_OPERAND = 4 * 1024**2  # characters, entries or digits in the result of one operator
STEP, WROTE = "_template_step", "_template_wrote"  # Names by which a metered template calls its budget

_LONG_FORMAT = re.compile(r"%[-#0 +]*(\*|\d{5,}|\d*\.\d{5,})")
_LONG_FIELD = re.compile(r"\{[^}]*:[^}]*(\d{5,}|\{)")
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "tojson", "lipsum"}
"""Methods and filters with a result size given by an argument."""


class TemplateBudget:
    """The remaining budget of one rendering. Raises SecurityError when it is exhausted."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._steps = limits.num_steps
        self._characters = limits.num_written

    def step(self, num_literal: int) -> None:
        """Count one execution of a body with `num_literal` characters of plain text."""
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"it loops more than {self._limits.num_steps} times.")
        self._spend(num_literal)

    def wrote(self, value: Any) -> Any:
        """Count a value that is written, and return it."""
        self._spend(len(value) if isinstance(value, str) else 16)
        return value

    def _spend(self, num_characters: int) -> None:
        self._characters -= num_characters
        if self._characters < 0:
            raise SecurityError(f"it writes more than {self._limits.num_written} characters.")


class _Meter(NodeTransformer):
    """Inserts calls to the budget into a template."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [
            one if isinstance(one, nodes.TemplateData) else self._call(WROTE, one, one.lineno) for one in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return self._call(WROTE, node, node.lineno)

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        num_literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        report = nodes.ExprStmt(self._call(STEP, nodes.Const(num_literal), node.lineno))
        node.body.insert(0, report.set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _count

    def _call(self, name: str, argument: nodes.Expr, lineno: int) -> nodes.Call:
        call = nodes.Call(nodes.Name(name, "load"), [argument], [], None, None)
        call.set_lineno(lineno).set_environment(self._environment)
        return call


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise SecurityError if the result of an operation would be too large."""
    size = 0
    if operator == "+":
        if hasattr(left, "__len__") and hasattr(right, "__len__"):
            size = len(left) + len(right)
    elif operator == "%":
        size = 2 * MAX_OPERAND if isinstance(left, str) and _LONG_FORMAT.search(left) else 0
    elif isinstance(left, int) and isinstance(right, int):
        size = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
    elif operator == "*":
        sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
        size = len(sized) * times if hasattr(sized, "__len__") and isinstance(times, int) else 0
    if size > MAX_OPERAND:
        raise SecurityError(f"`{operator}` would give something larger than {MAX_OPERAND} characters.")


def check_arguments(name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise SecurityError if the result of a method or filter would be too large.

    `arguments`: the object or filtered value first.
    """
    given = [*arguments, *named.values()]
    size = 0
    if name in _PADDING:
        size = max((abs(one) for one in given if isinstance(one, int)), default=0)
        if name in ("indent", "expandtabs", "tojson") and given:
            size *= max(1, len(given[0]) if hasattr(given[0], "__len__") else 1)
    elif name == "replace":
        texts = [one for one in given if isinstance(one, str)]
        if len(texts) >= 3:
            size = len(texts[0]) + len(texts[2]) * (texts[0].count(texts[1]) if texts[1] else len(texts[0]) + 1)
    elif name == "join":
        glue = next((one for one in given if isinstance(one, str)), "")
        most = max((len(one) for one in given if isinstance(one, list | tuple)), default=0)
        size = len(glue) * most
    elif name in ("format", "format_map"):
        text = given[0] if given and isinstance(given[0], str) else ""
        size = 2 * MAX_OPERAND if _LONG_FORMAT.search(text) or _LONG_FIELD.search(text) else 0
    if size > MAX_OPERAND:
        raise SecurityError(f"`{name}` would give something larger than {MAX_OPERAND} characters.")


def check_result(name: str, value: Any) -> Any:
    """Return the value. Raises SecurityError if it is too large."""
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > MAX_OPERAND:
        raise SecurityError(f"`{name}` gives something larger than {MAX_OPERAND} characters.")
    return value


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, with bounded operators."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, one) for name, one in self.filters.items()}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _raise  # each rendering has its own

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, function: Any, *arguments: Any, **named: Any) -> Any:
        name = getattr(function, "__name__", "")
        on = getattr(function, "__self__", None)
        check_arguments(name, (on, *arguments) if isinstance(on, str) else arguments, named)
        return check_result(name, super().call(context, function, *arguments, **named))


def _bounded(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it refuses results that are too large."""

    @functools.wraps(apply)  # keeps Jinja's pass_context and pass_environment marks
    def checked(*arguments: Any, **named: Any) -> Any:
        given = [one for one in arguments if not isinstance(one, jinja2.Environment | jinja2.runtime.Context)]
        check_arguments(name, given, named)
        return check_result(name, apply(*arguments, **named))

    return checked


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; it renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Extension declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class TemplateFault(Exception):
    """A template that cannot be compiled, or that does not take the messages; the message says why."""


class RenderedTooLong(TemplateFault):
    """The rendered text exceeds its limit."""


@dataclass(frozen=True)
class CompiledTemplate:
    """A template that is ready to render. `variables`: the names that it reads and that no template has by itself."""

    template: jinja2.Template
    variables: frozenset[str]

    def render(self, values: Mapping[str, Any], limits: TemplateLimits) -> str:
        """Return the text. Raises TemplateFault."""
        budget = TemplateBudget(limits)
        pieces: list[str] = []
        length = 0
        try:
            for piece in self.template.generate({**values, STEP: budget.step, WROTE: budget.wrote}):
                pieces.append(piece)
                length += len(piece)
                if length > limits.num_prompt:
                    raise RenderedTooLong(f"The messages give more than {limits.num_prompt} characters.")
        except (RenderedTooLong, MemoryError):
            raise
        except Exception as error:  # whatever a template raises
            raise TemplateFault(str(error)[:300]) from error
        return "".join(pieces)


@lru_cache(maxsize=16)
def compile_template(source: str) -> CompiledTemplate:
    """Raises TemplateFault."""
    environment = _Sandbox()
    try:
        parsed = environment.parse(source)
        variables = frozenset(meta.find_undeclared_variables(parsed) - environment.globals.keys())
        _Meter(environment).visit(parsed)
        return CompiledTemplate(environment.from_string(parsed), variables)
    except (jinja2.TemplateError, SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        # Some errors, such as a `break` outside a loop, are found only by Python's compiler.
        raise TemplateFault(str(error)[:300]) from error


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. Jinja's own filter escapes for HTML, which models are not trained on."""
    return written_numbers.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class OutOfTime(BaseException):
    """The time of a job is used up. No template and no filter catches it."""


@dataclass
class _Clock:
    """Raises OutOfTime in a block that takes more than its processor time; ends the process where that does not help,
    as within one long operation of the interpreter.
    """

    _runs: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        signal.signal(signal.SIGPROF, self._rang)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)

    def start(self, seconds: float) -> None:
        self._runs = True
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds + 0.25)  # ends the process
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.05)  # again where a first one was raised in a destructor

    def stop(self) -> None:
        self._runs = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)

    def _rang(self, number: int, frame: FrameType | None) -> None:
        if self._runs:
            raise OutOfTime


def answer(job: TemplateJob, limits: TemplateLimits, number: int, clock: _Clock) -> TemplateAnswer:
    """Do a job. Raises OutOfTime, MemoryError."""
    try:
        clock.start(limits.compile_seconds)
        compiled = compile_template(job.source)
        if job.values is None:
            return TemplateAnswer(number, AnswerKind.TEXT, " ".join(sorted(compiled.variables)))
        clock.start(limits.seconds)
        now = {} if job.now is None else {"strftime_now": job.now.strftime}
        return TemplateAnswer(number, AnswerKind.TEXT, compiled.render({**job.values, **now}, limits))
    except RenderedTooLong as error:
        return TemplateAnswer(number, AnswerKind.TOO_LONG, str(error))
    except TemplateFault as error:
        return TemplateAnswer(number, AnswerKind.FAULT, str(error))


def main() -> None:
    """Do the jobs that stdin brings, and write each answer to stdout. The arguments: bytes of memory, and niceness."""
    memory, niceness = map(int, sys.argv[1:])
    _bound_memory(memory)
    os.nice(niceness)
    jobs, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # nothing else writes an answer
    clock = _Clock()
    gc.freeze()
    _write(answers, write_answer(TemplateAnswer(READY, AnswerKind.TEXT)))
    while True:
        try:
            number, limits, job = read_job(jobs)
        except EOFError:
            return
        kind = AnswerKind.NO_TIME
        text = b""
        try:
            try:
                text = write_answer(answer(job, limits, number, clock))
            except MemoryError:
                kind = AnswerKind.NO_MEMORY
            finally:
                clock.stop()
        except OutOfTime:
            clock.stop()
        del job
        _write(answers, text or write_answer(TemplateAnswer(number, kind)))


def _write(pipe: int, message: bytes) -> None:
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _bound_memory(num_bytes: int) -> None:
    with contextlib.suppress(ImportError):  # not available on this system
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
