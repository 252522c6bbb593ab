"""The alphabet of byte-level tokenizers."""

from __future__ import annotations


def byte_letters() -> dict[str, int]:
    """Return the printable letter that byte-level tokenizers write for each byte (GPT-2's table): letter -> byte.

    Bytes that print stand for themselves; the others are the letters from 256 on, in turn.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in letters.values()]
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}
