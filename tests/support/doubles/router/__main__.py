"""`python -m doubles.router --listen unix:/tmp/w.sock`: a scripted worker as a process.

Takes the flags of `python -m space_server` too, so that a supervisor can start it in its place; those that only a model
could heed are ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import signal
import sys
from pathlib import Path

from space_common.worker.secret import SecretFile

from doubles.router.script import Accepts, FixedReply, HashLanguage, Language, Script, always, half, never, sometimes
from doubles.router.scripted_worker import ScriptedWorker

ACCEPTS: dict[str, Accepts] = {"never": never, "always": always, "half": half, "sometimes": sometimes}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m doubles.router")
    parser.add_argument("--listen", required=True, help="unix:PATH or HOST:PORT")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json whose vocabulary is spoken")
    parser.add_argument("--reply", help="always answer this text (needs --tokenizer)")
    parser.add_argument("--accepts", choices=sorted(ACCEPTS), default="sometimes")
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048, help="window, in tokens")
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--die-after-steps", type=int, help="exit 1 after so many steps")
    parser.add_argument("--fail", help="print this on stderr and exit 1 at once, as a bad model path does")
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--worker-secret-file", type=Path)
    parser.add_argument("--parent-pid", type=int, help="exit when this process is gone")
    return parser.parse_known_args(argv)[0]


def script_of(args: argparse.Namespace) -> Script:
    vocab: list[int] = list(range(4, 250))
    vocab_size, tokenizer_hash = 256, ""
    language: Language = HashLanguage(vocab)
    if args.tokenizer is not None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(args.tokenizer))
        special = {i for i, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        vocab = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()) - special)
        vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        tokenizer_hash = hashlib.sha256(args.tokenizer.read_bytes()).hexdigest()
        reply = tokenizer.encode(args.reply, add_special_tokens=False).ids if args.reply else []
        language = FixedReply(reply) if reply else HashLanguage(vocab)
    return Script(
        language=language, accepts=ACCEPTS[args.accepts], draft_length=args.draft_length, vocab_size=vocab_size,
        block_size=args.block_size, num_blocks=args.num_blocks, window=args.max_model_len,
        max_sequences=args.max_sequences, mask_ids=(), eos_ids=(), model_name=args.model,
        tokenizer_hash=tokenizer_hash, step_seconds=args.step_seconds, die_after_steps=args.die_after_steps,
    )  # fmt: skip


async def serve(args: argparse.Namespace) -> int:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    secret = None if args.worker_secret_file is None else SecretFile(args.worker_secret_file)
    async with ScriptedWorker(script_of(args), listen=args.listen, secret=secret) as worker:
        sys.stdout.write(f"ready {worker.address}\n")
        sys.stdout.flush()
        while not (stop.is_set() or worker.drained.is_set()):
            if worker.num_lives > 1:
                os._exit(1)
            if args.parent_pid is not None and os.getppid() != args.parent_pid:
                os._exit(0)
            try:
                await asyncio.wait_for(stop.wait(), 0.02)
            except TimeoutError:
                continue
    return 0


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.fail is not None:
        sys.stderr.write(args.fail + "\n")
        return 1
    return asyncio.run(serve(args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
