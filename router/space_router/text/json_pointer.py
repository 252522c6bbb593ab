"""What a local reference of a JSON schema refers to (RFC 6901, behind `#`)."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def resolve(root: Any, reference: str) -> Any:
    """Return what `#/...` refers to. Raises LookupError if there is nothing, or it is no such reference."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        raise LookupError(reference)
    found = root
    for name in unquote(reference[2:]).split("/"):
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal():
            found = found[int(key[:9])]
        elif isinstance(found, Mapping):
            found = found[key]
        else:
            raise LookupError(reference)
    return found
