"""Formats of texts in JSON schemas, as the grammar library has to be given them: its own expressions leave bounds out.

Sources: RFC 5321 (4.5.3.1) and RFC 1035 (2.3.4) for lengths, RFC 3339 (5.7) for days, RFC 5891 (4.2.3.1) for hyphens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_ALNUM, _IN_LABEL = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LABEL = (
    f"{_ALNUM}(?:{_ALNUM}|{_IN_LABEL}{_ALNUM}|{_IN_LABEL}{{2}}{_ALNUM}"
    f"|{_IN_LABEL}(?:{_ALNUM}{_IN_LABEL}|-{_ALNUM}){_IN_LABEL}{{0,58}}{_ALNUM})?"
)
"""At most 63 characters; not two hyphens in places 3 and 4, which mark names in other encodings."""
_NAME = rf"{_LABEL}(?:\.{_LABEL})*"

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # two digits, a multiple of 4, without 00
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_HOUR_MINUTE})"
"""Without second 60, which only the last minutes of some days have."""

_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "email": (rf"^{_ATOM}(?:\.{_ATOM})*@{_NAME}$", "^[^@]{1,64}@.{1,189}$"),
    "hostname": (f"^{_NAME}$", "^.{1,253}$"),
    "date": (f"^{_DATE}$",),
    "time": (f"^{_TIME}$",),
    "date-time": (f"^{_DATE}[Tt]{_TIME}$",),
}
"""Patterns that each text of a format must match, beside the library's own expression."""


def with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with the patterns of its `format`; values that are listed one by one stay as they are."""
    patterns = _PATTERNS.get(schema.get("format", "")) if isinstance(schema.get("format"), str) else None
    if patterns is None or schema.keys() & {"const", "enum"}:
        return schema
    given = schema.get("allOf")
    return schema | {"allOf": [*(given if isinstance(given, list) else ()), *({"pattern": one} for one in patterns)]}
