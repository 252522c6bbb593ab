"""Hostile commands to a worker: of a router of another version, or none of ours."""

from __future__ import annotations

import asyncio
import logging
import time
from random import Random

from google.protobuf.message import DecodeError
from space_proto import worker_pb2 as pb
from space_server.controller import FixedLayout
from space_server.testing import ScriptedModel
from space_server.worker import ProtocolError, Worker

from space_eval.fuzz_target import Finding
from space_eval.fuzz_values import fill, spoiled

_LOG = logging.getLogger("space_server")

NUM_BLOCKS, BLOCK_SIZE, MOST_STEPS, SECONDS = 64, 4, 12, 20.0


class WorkerCommands:
    """Applied and stepped: a command is heeded, harms its own sequence alone, or ends the conversation."""

    name = "worker commands"

    async def __aenter__(self) -> WorkerCommands:
        self._level_before = _LOG.level
        _LOG.setLevel(logging.CRITICAL)
        self._renew()
        return self

    def _renew(self) -> None:
        self._worker = Worker(
            ScriptedModel(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_sequences=8,
            controller=FixedLayout.full(3),
        )  # fmt: skip

    async def __aexit__(self, *error: object) -> None:
        _LOG.setLevel(self._level_before)

    async def settle(self) -> None:
        """A good sequence gives its text, whatever came before it."""
        await asyncio.sleep(0)
        if self._worker.draining:
            self._renew()
        self._worker.reset()
        self._worker.apply(pb.Command(start=pb.Start(protocol_major=1, max_prefill_rows=64, max_draft_length=3)))
        self._worker.apply(pb.Command(admit=_good(1)))
        tokens: list[int] = []
        for _ in range(MOST_STEPS):
            if (report := self._worker.step()) is not None:
                tokens += [id_ for part in report.sequences for id_ in part.tokens]
        if len(tokens) != 8:
            raise Finding(f"a good sequence gave {tokens}")
        self._worker.reset()

    async def try_one(self, dice: Random) -> str:
        if self._worker.draining:  # it would end now
            self._renew()
        worker = self._worker
        worker.reset()
        begun = time.monotonic()
        try:
            if dice.random() < 0.95:
                worker.apply(pb.Command(start=pb.Start(protocol_major=1, max_prefill_rows=64, max_draft_length=3)))
            for number in range(1, dice.randint(2, 5)):
                worker.apply(_hostile(dice, number))
                for _ in range(dice.randint(0, 3)):
                    worker.step()
            for _ in range(MOST_STEPS):
                worker.step()
        except ProtocolError:
            return "refused"
        except DecodeError:
            return "undecodable"
        if time.monotonic() - begun > SECONDS:
            raise Finding(f"it took {time.monotonic() - begun:.1f} s")
        return "heeded"


def _good(seq_id: int) -> pb.Admit:
    return pb.Admit(
        seq_id=seq_id, ids=[5, 6, 7], num_prompt=3, pages=range(8 * seq_id, 8 * seq_id + 6),
        limits=pb.Limits(max_tokens=8), max_draft_length=3,
    )  # fmt: skip


def _hostile(dice: Random, number: int) -> pb.Command:
    command = pb.Command()
    kind = dice.random()
    if kind < 0.6:
        admit = _good(number)
        fill(dice, admit, dice.choice((0.0, 0.03, 0.1)))
        if dice.random() < 0.8:
            admit.seq_id = number
        command.admit.CopyFrom(admit)
    elif kind < 0.75:
        command.extend.CopyFrom(pb.Extend(seq_id=dice.randint(0, number), pages=[dice.randint(0, 70)]))
    elif kind < 0.85:
        command.release.CopyFrom(pb.Release(seq_id=dice.randint(0, number)))
    else:
        fill(dice, command, 0.3)
    if dice.random() < 0.15:
        command.ParseFromString(spoiled(dice, command.SerializeToString()))
    return command
