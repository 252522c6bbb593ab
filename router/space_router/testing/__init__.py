"""A worker without a model, for tests of everything in front of it: real gRPC, a made-up language, strict about pages.

`python -m space_router.testing --listen unix:/tmp/w.sock` runs one as a process.
"""

from space_router.testing.language import FixedReply, HashLanguage, Language
from space_router.testing.page_ledger import PageLedger, Violation
from space_router.testing.script import Accepts, Script, always, half, listed, never, sometimes
from space_router.testing.scripted_batch import Figures, ScriptedBatch
from space_router.testing.scripted_worker import ScriptedWorker

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
