"""A worker without a model, for tests of everything in front of it: real gRPC, a made-up language, strict about pages.

`python -m doubles.router --listen unix:/tmp/w.sock` runs one as a process.
"""

from doubles.router.language import FixedReply, HashLanguage, Language
from doubles.router.page_ledger import PageLedger, Violation
from doubles.router.script import Accepts, Script, always, half, listed, never, sometimes
from doubles.router.scripted_batch import Figures, ScriptedBatch
from doubles.router.scripted_worker import ScriptedWorker

__all__ = [
    "Accepts",
    "Figures",
    "FixedReply",
    "HashLanguage",
    "Language",
    "PageLedger",
    "Script",
    "ScriptedBatch",
    "ScriptedWorker",
    "Violation",
    "always",
    "half",
    "listed",
    "never",
    "sometimes",
]
