"""`stream_options.include_obfuscation`: events of few different sizes, so that their sizes say little of the text."""

import secrets

STEP = 128
"""Bytes; every event is a whole number of these long."""

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_FIELD = b',"obfuscation":"'
_LETTERS = bytes(_ALPHABET[i % 64] for i in range(256))


def obfuscated(event: bytes) -> bytes:
    """An event of a stream, `data: {...}` and two line ends, with a field of random letters at its end."""
    head = event.removesuffix(b"}\n\n")
    num_letters = -(len(head) + len(_FIELD) + len(b'"}\n\n')) % STEP
    return head + _FIELD + secrets.token_bytes(num_letters).translate(_LETTERS) + b'"}\n\n'
