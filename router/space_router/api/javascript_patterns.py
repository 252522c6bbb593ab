"""Patterns in JSON schemas, which are JavaScript's (ECMA-262), for the grammar library, which reads Rust's.

of_javascript("^a{,2}.$")  # r"^a\\{,2}[^\\n\\r\\u2028\\u2029]$"
"""

from __future__ import annotations

import re
from itertools import pairwise

_ESCAPE = (
    r"\\u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}|\\u\{[0-9A-Fa-f]{1,6}\}|\\u[0-9A-Fa-f]{4}"
    r"|\\x[0-9A-Fa-f]{2}|\\c[A-Za-z]|\\[pP]\{[^{}]*\}|\\k<[^<>]*>|\\."
)
_IN_CLASS = re.compile(rf"(?P<escape>{_ESCAPE})|(?P<end>\])|(?P<other>.)", re.DOTALL)
_PARTS = re.compile(
    rf"(?P<escape>{_ESCAPE})|(?P<all>\[\^\])|(?P<none>\[\])|(?P<class>\[\^?)|(?P<dot>\.)|(?P<quantifier>"
    r"\{\d+(?:,\d*)?\}\??|[*+?]\??)|(?P<group>\((?:\?(?::|P?<[A-Za-z_]\w*>|<?[=!]))?)"
    r"|(?P<close>\))|(?P<bar>\|)|(?P<start>\^)|(?P<stop>\$)|(?P<other>.)",
    re.DOTALL,
)
_SPACES = r"\t-\r \u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_NO_SPACES = (
    r"\u0000-\u0008\u000E-\u001F!-\u009F\u00A1-\u167F\u1681-\u1FFF\u200B-\u2027\u202A-\u202E\u2030-\u205E"
    r"\u2060-\u2FFF\u3001-\uFEFE\uFF00-\U0010FFFF"
)
_SETS = {r"\s": _SPACES, r"\S": _NO_SPACES}
"""Rust's are other characters: with U+0085 and without U+FEFF."""
_ALL, _NONE, _NO_LINE_END = r"[\u0000-\U0010FFFF]", r"[^\u0000-\U0010FFFF]", r"[^\n\r\u2028\u2029]"
_SHARED = frozenset([r"\d", r"\D", r"\w", r"\W", r"\f", r"\n", r"\r", r"\t", r"\v"])
_NOT_REGULAR = frozenset(["(?=", "(?!", "(?<=", "(?<!"])


def of_javascript(pattern: str) -> str | None:
    """Return a pattern for the grammar library, or None: no automaton matches it, it is none of JavaScript's, or it has
    `^` or `$` where the library does not take them."""
    try:
        parts = _parts(pattern)
    except ValueError:
        return None
    return None if _has_inner_anchor([kind for kind, _ in parts]) else "".join(text for _, text in parts)


def _parts(pattern: str) -> list[tuple[str, str]]:
    """Return the parts of a pattern as Rust writes them, each with its kind. Raises ValueError."""
    parts: list[tuple[str, str]] = []
    place, depth = 0, 0
    while found := _PARTS.match(pattern, place):
        kind, text, place = found.lastgroup or "", found[0], found.end()
        if kind == "class":
            text, place = _class(pattern, place, text)
        elif kind == "escape":
            text = f"[{_SETS[text]}]" if text in _SETS else _escaped(text)
        elif kind == "group":
            if text in _NOT_REGULAR or (text == "(" and pattern.startswith("?", place)):
                raise ValueError(text)
            depth += 1
        elif kind == "close":
            depth -= 1
        elif kind == "quantifier" and (not parts or parts[-1][0] in ("group", "bar", "start", "stop", "quantifier")):
            raise ValueError(pattern)  # nothing to repeat
        elif text == "\\":
            raise ValueError(pattern)
        elif text == "{":
            text = r"\{"
        parts.append((kind, {"all": _ALL, "none": _NONE, "dot": _NO_LINE_END}.get(kind, text)))
        if depth < 0:
            raise ValueError(pattern)
    if depth or place < len(pattern):
        raise ValueError(pattern)
    return parts


def _class(pattern: str, place: int, written: str) -> tuple[str, int]:
    """Return the class that begins with `written` as Rust writes it, and where the pattern goes on behind it."""
    before = ""  # what the range that `-` may make would begin with; empty: nothing
    while found := _IN_CLASS.match(pattern, place):
        kind, text, place = found.lastgroup, found[0], found.end()
        if kind == "end":
            return written + "]", place
        if kind == "escape":
            is_set = text[1] in "dDsSwWpP"
            text = r"\u0008" if text == r"\b" else _SETS.get(text) or _escaped(text)
            before = "" if is_set or before == "-" else text
        elif text == "-" and before and before != "-" and not re.match(r"\]|\\[dDsSwWpP]", pattern[place : place + 2]):
            before = "-"
        else:
            text = "\\" + text if text in "[-&~^" else text
            before = "" if before == "-" else text
        written += text
    raise ValueError(pattern)


def _escaped(text: str) -> str:
    """Return an escaped character, or a set of characters, as Rust writes it. Raises ValueError."""
    name = text[1]
    if text in _SHARED:
        return text
    if name in "pP":
        return _property(text)
    if name == "u" and len(text) == 12:
        return _code(ord(bytes.fromhex(text[2:6] + text[8:]).decode("utf-16-be")))
    if name in "ux" and len(text) > 2:
        code = int(text[2:].strip("{}"), 16)
        if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            raise ValueError(text)
        return _code(code)
    if name == "c" and len(text) > 2:
        return _code(ord(text[2]) % 32)
    if text == r"\0":
        return _code(0)
    if name in "bBkc123456789":
        raise ValueError(text)  # a word's edge, or a reference to a group
    return text if name in r"\^$.*+?()[]{}|/-" else re.escape(name)


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\S+", text))


_CATEGORIES = _words(
    "C Other Cc Control cntrl Cf Format Cn Unassigned Co Private_Use L Letter LC Cased_Letter Ll Lowercase_Letter Lm "
    "Modifier_Letter Lo Other_Letter Lt Titlecase_Letter Lu Uppercase_Letter M Mark Combining_Mark Mc Spacing_Mark Me "
    "Enclosing_Mark Mn Nonspacing_Mark N Number Nd Decimal_Number digit Nl Letter_Number No Other_Number P Punctuation "
    "punct Pc Connector_Punctuation Pd Dash_Punctuation Pe Close_Punctuation Pf Final_Punctuation Pi "
    "Initial_Punctuation Po Other_Punctuation Ps Open_Punctuation S Symbol Sc Currency_Symbol Sk Modifier_Symbol Sm "
    "Math_Symbol So Other_Symbol Z Separator Zl Line_Separator Zp Paragraph_Separator Zs Space_Separator"
)
_BINARY = _words(
    "ASCII ASCII_Hex_Digit AHex Alphabetic Alpha Any Assigned Bidi_Control Bidi_C Bidi_Mirrored Bidi_M Case_Ignorable "
    "CI Cased Changes_When_Casefolded CWCF Changes_When_Casemapped CWCM Changes_When_Lowercased CWL "
    "Changes_When_Titlecased CWT Changes_When_Uppercased CWU Dash Default_Ignorable_Code_Point DI Deprecated Dep "
    "Diacritic Dia Emoji Emoji_Component EComp Emoji_Modifier EMod Emoji_Modifier_Base EBase Emoji_Presentation EPres "
    "Extended_Pictographic ExtPict Extender Ext Grapheme_Base Gr_Base Grapheme_Extend Gr_Ext Hex_Digit Hex "
    "IDS_Binary_Operator IDSB IDS_Trinary_Operator IDST ID_Continue IDC ID_Start IDS Ideographic Ideo Join_Control "
    "Join_C Logical_Order_Exception LOE Lowercase Lower Math Noncharacter_Code_Point NChar Pattern_Syntax Pat_Syn "
    "Pattern_White_Space Pat_WS Quotation_Mark QMark Radical Regional_Indicator RI Sentence_Terminal STerm Soft_Dotted "
    "SD Terminal_Punctuation Term Unified_Ideograph UIdeo Uppercase Upper Variation_Selector VS White_Space space "
    "XID_Continue XIDC XID_Start XIDS"
)
"""Names that JavaScript has, as it spells them: it takes no other spelling, while Rust ignores case and underscores."""
_SCRIPT = re.compile(
    r"(?:Script|sc|Script_Extensions|scx)=(?!Unknown|Zzzz)(?:[A-Z][a-z]+(?:_[A-Z][a-z]+)*|SignWriting)"
)


def _property(text: str) -> str:
    """Return `\\p{...}` or `\\P{...}` as Rust writes it. Raises ValueError for what one of the two does not have."""
    name = text[3:-1]
    category = re.sub(r"^(?:General_Category|gc)=", "", name)
    if category in _CATEGORIES:
        return f"{text[:2]}{{gc={category}}}"
    if name in _BINARY or _SCRIPT.fullmatch(name):
        return text
    raise ValueError(text)


def _code(code: int) -> str:
    """Return a character as Rust and Python write it."""
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _has_inner_anchor(kinds: list[str]) -> bool:
    """Return whether something stands before a `^` or behind a `$` in a branch, or a group with one is repeated."""
    inside = [False]  # whether each open group has an anchor
    for kind, following in pairwise([*kinds, ""]):
        if kind == "group":
            inside.append(False)
        elif kind == "close" and (has_anchor := inside.pop()):
            inside[-1] = has_anchor
            if following == "quantifier":
                return True
        elif kind in ("start", "stop"):
            inside[-1] = True
    return not _is_first(kinds, "start", "group", "close") or not _is_first(kinds[::-1], "stop", "close", "group")


def _is_first(kinds: list[str], anchor: str, opens: str, closes: str) -> bool:
    """Return whether nothing stands before each `anchor` in its branch, nor before the groups that it is in."""
    is_edge, edges = True, [True]  # here, and where each open group begins
    for kind in kinds:
        if kind == opens:
            edges.append(is_edge)
        elif kind == closes:
            edges.pop()
            is_edge = False
        elif kind == "bar":
            is_edge = edges[-1]
        elif kind == anchor and not is_edge:
            return False
        elif kind not in ("start", "stop"):
            is_edge = False
    return True
