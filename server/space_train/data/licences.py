"""Permitted licences of training sources, read from the metadata of each distribution."""

from __future__ import annotations

import re
from email.message import Message

PERMISSIVE = frozenset(
    {"0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0"}
    | {"HPND", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"}
)

# Free-text `License:` fields and trove classifiers as found in packages, mapped to SPDX identifiers.
FREE_TEXT = {
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "python software foundation license": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
} | {identifier.lower(): identifier for identifier in PERMISSIVE}


class NotPermissive(ValueError):
    """A source whose metadata does not prove a permissive licence."""


def audited_licence(metadata: Message) -> str:
    """Return the SPDX identifiers that a distribution's metadata proves. Raises NotPermissive if it proves none.

    The order of trust: the SPDX expression (every part must be permissive; of an `OR`, one), the trove classifiers (all
    of them), the free-text field (exact phrases only: a pasted licence text proves nothing).
    """
    name = metadata.get("Name", "a distribution without a name")
    expression = metadata.get("License-Expression")
    if expression:
        clauses = re.split(r"\s+AND\s+", expression.replace("(", " ").replace(")", " ").strip())
        chosen = [[part for part in re.split(r"\s+OR\s+", clause) if part.strip() in PERMISSIVE] for clause in clauses]
        if not all(chosen):
            raise NotPermissive(f"{name}: the licence expression {expression!r} has a part that is not permissive.")
        return " AND ".join(dict.fromkeys(parts[0].strip() for parts in chosen))
    lines = [line for line in metadata.get_all("Classifier", []) if line.startswith("License ::")]
    classifiers = [line.split("::")[-1].strip() for line in lines]
    classifiers = [line for line in classifiers if line != "OSI Approved"]
    if not classifiers and metadata.get("License"):
        classifiers = [str(metadata["License"]).strip()]
    identifiers = [FREE_TEXT.get(text.lower()) for text in classifiers]
    known = [identifier for identifier in identifiers if identifier is not None]
    if not known or len(known) != len(identifiers):
        raise NotPermissive(f"{name}: no permissive licence in its metadata (it says {classifiers or 'nothing'}).")
    return " AND ".join(dict.fromkeys(known))
