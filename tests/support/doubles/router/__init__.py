"""A worker without a model, for tests of everything in front of it: real gRPC, a made-up language, strict about pages.

`python -m doubles.router --listen unix:/tmp/w.sock` runs one as a process.
"""

from doubles.router.script import (
    Accepts,
    FixedReply,
    HashLanguage,
    Language,
    Script,
    always,
    half,
    listed,
    never,
    sometimes,
)
from doubles.router.scripted_worker import Figures, PageLedger, ScriptedBatch, ScriptedWorker, Violation

__all__ = [
    "Accepts", "Figures", "FixedReply", "HashLanguage", "Language", "PageLedger", "Script", "ScriptedBatch",
    "ScriptedWorker", "Violation", "always", "half", "listed", "never", "sometimes",
]  # fmt: skip
