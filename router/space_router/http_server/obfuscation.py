"""`stream_options.include_obfuscation`: pad events to a few sizes, so that sizes reveal little about the text."""

import secrets

STEP = 128
"""Event sizes are multiples of this many bytes."""

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_FIELD = b',"obfuscation":"'
_LETTERS = bytes(_ALPHABET[i % 64] for i in range(256))


def obfuscated(event: bytes) -> bytes:
    """Append a field of random letters to a stream event (`data: {...}` and two line ends)."""
    head = event.removesuffix(b"}\n\n")
    num_letters = -(len(head) + len(_FIELD) + len(b'"}\n\n')) % STEP
    return head + _FIELD + secrets.token_bytes(num_letters).translate(_LETTERS) + b'"}\n\n'
