"""How fast the workers are, as their reports tell."""

from __future__ import annotations

from space_proto import worker_pb2

MEMORY = 0.95  # weight of the past per step
SURELY = 0.5  # of the time that things take now: nothing is called impossible that a faster hour could do


class Pace:
    """Seconds per prompt id and per generated id of one stream, as moving averages over steps; 0 while unknown."""

    def __init__(self) -> None:
        self.seconds_per_prompt_id = 0.0
        self.seconds_per_token = 0.0

    def learn(self, report: worker_pb2.StepReport) -> None:
        """One more step."""
        if not report.stepped:
            return
        stats, seconds = report.stats, step_seconds(report.stats)
        decoded = [len(part.tokens) for part in report.sequences if part.decoded and part.tokens]
        if stats.prefill_rows > stats.chain_rows + stats.mask_rows:
            num_rows = stats.prefill_rows + stats.chain_rows + stats.mask_rows
            self.seconds_per_prompt_id = _average(self.seconds_per_prompt_id, seconds / num_rows)
        elif decoded:
            self.seconds_per_token = _average(self.seconds_per_token, seconds * len(decoded) / sum(decoded))

    def seconds(self, num_prompt_ids: int, num_tokens: float) -> float:
        """What computing a prompt and generating so many ids takes at this pace."""
        return num_prompt_ids * self.seconds_per_prompt_id + num_tokens * self.seconds_per_token

    def least_seconds(self, num_prompt_ids: int, num_tokens: int) -> float:
        """What it surely takes."""
        return SURELY * self.seconds(num_prompt_ids, num_tokens)


def step_seconds(stats: worker_pb2.StepStats) -> float:
    """How long a step took, all its phases together."""
    return stats.forward_seconds + stats.sample_seconds + stats.draft_seconds + stats.host_seconds


def _average(known: float, new: float) -> float:
    return new if not known else MEMORY * known + (1 - MEMORY) * new
