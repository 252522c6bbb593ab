"""Limits on the work and the output of one chat template rendering.

A template is a program from a checkpoint. Jinja's sandbox isolates it from the machine but does not limit loops or
output size, so every loop iteration, macro call and written text (also into variables) is counted.
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError
from jinja2.visitor import NodeTransformer

MAX_STEPS = 500_000  # loop iterations and macro calls: 120 for each of 4096 messages
MAX_WRITTEN = 64 * 1024**2  # characters, counted each time they are written; far above any context window
MAX_OPERAND = 4 * 1024**2  # characters, entries or digits in the result of one operator
MAX_SECONDS = 10.0  # bounds loops that are not counted, such as those inside filters
STEP, WROTE = "_template_step", "_template_wrote"
"""Names by which a metered template calls its budget."""

_LONG_FORMAT = re.compile(r"%[-#0 +]*(\*|\d{5,}|\d*\.\d{5,})")
_LONG_FIELD = re.compile(r"\{[^}]*:[^}]*(\d{5,}|\{)")
_PADDING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "tojson", "lipsum"}
)
"""Methods and filters with a result size given by an argument."""


class TemplateBudget:
    """The remaining budget of one rendering. Raises SecurityError when it is exhausted."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_WRITTEN
        self._deadline = time.monotonic() + MAX_SECONDS

    @property
    def names(self) -> dict[str, Any]:
        """Variables that a metered template must be rendered with."""
        return {STEP: self.step, WROTE: self.wrote}

    def step(self, num_literal: int) -> None:
        """Count one execution of a body with `num_literal` characters of plain text."""
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"it loops more than {MAX_STEPS} times.")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it takes longer than {MAX_SECONDS:g} seconds.")
        self._spend(num_literal)

    def wrote(self, value: Any) -> Any:
        """Count a value that is written, and return it."""
        self._spend(len(value) if isinstance(value, str) else 16)
        return value

    def _spend(self, num_characters: int) -> None:
        self._characters -= num_characters
        if self._characters < 0:
            raise SecurityError(f"it writes more than {MAX_WRITTEN} characters.")


def metered(environment: Environment, template: nodes.Template) -> nodes.Template:
    """Insert calls to the budget into a template and return it."""
    _Meter(environment).visit(template)
    return template


class _Meter(NodeTransformer):
    """Inserts the calls to the budget."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._count(node)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self._count(node)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        self._count(node)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [
            one if isinstance(one, nodes.TemplateData) else self._call(WROTE, one, one.lineno) for one in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return self._call(WROTE, node, node.lineno)

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> None:
        num_literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        report = nodes.ExprStmt(self._call(STEP, nodes.Const(num_literal), node.lineno))
        node.body.insert(0, report.set_lineno(node.lineno))

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
        size = MAX_WRITTEN if isinstance(left, str) and _LONG_FORMAT.search(left) else 0
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
        size = MAX_WRITTEN if _LONG_FORMAT.search(text) or _LONG_FIELD.search(text) else 0
    if size > MAX_OPERAND:
        raise SecurityError(f"`{name}` would give something larger than {MAX_OPERAND} characters.")


def check_result(name: str, value: Any) -> Any:
    """Return the value. Raises SecurityError if it is too large."""
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > MAX_OPERAND:
        raise SecurityError(f"`{name}` gives something larger than {MAX_OPERAND} characters.")
    return value
