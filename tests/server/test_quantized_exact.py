"""SPACE on a quantised checkpoint is plain decoding on the same quantised checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.worker import ScriptedDrafts
from quantized_testing import write_quantized
from space_common.worker_client import WorkerClient
from space_model.loading.load import load_model
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker

PROMPTS = [[70, 71, 72], [20] * 17 + [33, 90]]
Text = tuple[list[int], list[float]]


@pytest.mark.parametrize("kind", ["awq", "fp8 per tensor"])
def test_any_drafts_on_quantised_weights_give_the_plain_text(kind: str, tiny_path: Path, tmp_path: Path) -> None:
    write_quantized(tiny_path, tmp_path / "packed", tmp_path / "plain", kind)
    model = load_model(tmp_path / "packed", dtype="float32", num_threads=1)

    def texts(k: int, source: ScriptedDrafts | None = None) -> tuple[list[Text], set[int]]:
        router = WorkerClient(
            Worker(model, num_blocks=64, block_size=4, controller=FixedLayout.full(k), draft_source=source)
        )
        sampling = pb.Sampling(seed=3, temperature=0.9)
        numbers = [router.admit(p, max_tokens=24, sampling=sampling, want_logprobs=True) for p in PROMPTS]
        router.run()
        runs = [router.sequences[number] for number in numbers]
        found = [(run.tokens, [entry.logprob for report in run.reports for entry in report.logprobs]) for run in runs]
        return found, {a for run in runs for a in run.accepted}

    plain, _ = texts(0)
    known = {n: prompt + tokens for n, (prompt, (tokens, _)) in enumerate(zip(PROMPTS, plain, strict=True), start=1)}
    drafts = ScriptedDrafts(known, wrong=lambda p: p % 8 in (0, 1), other=lambda id_: 9 + (id_ - 8) % 119)
    assert texts(3)[0] == plain
    found, accepted = texts(3, drafts)
    assert found == plain
    assert {0, 3} < accepted
