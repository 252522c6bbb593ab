"""Tokens per step of a running server: each conversation without drafts and with `speculation: k`, over its API."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from space_common.http_client import Endpoint, HttpError, get_json, post_json
from space_common.repetition import is_looping
from tqdm import tqdm

from space_eval.acceptance.paired_decoding import PLAIN, TextsDiffer
from space_eval.data import Conversation, load_conversations
from space_eval.flags import EvalError, FlagError, read_api_key
from space_eval.report import (
    Journal,
    bootstrap,
    columns_table,
    facts,
    figure,
    from_json,
    markdown_facts,
    publish,
    ratio,
    ratio_of_sums,
)


@dataclass(frozen=True)
class ServedAnswer:
    """A server's answer to one turn of a conversation with one setting."""

    temperature: float
    max_drafts: int  # k; 0: without drafts
    conversation: int  # its number, from 0
    turn: int  # from 0
    ids: tuple[int, ...]
    text: str
    num_steps: int  # decode steps; the prefill, which gives the first token, is none
    num_decoded: int  # tokens of these steps
    num_drafted: int
    num_accepted: int
    seconds: float  # of the request

    @property
    def key(self) -> tuple[float, int, int, int]:
        return self.temperature, self.max_drafts, self.conversation, self.turn


@dataclass(frozen=True)
class ServedRow:
    """One setting over all answers. Means are over steps; bounds are of the 95 % bootstrap over conversations."""

    temperature: float
    max_drafts: int
    num_outputs: int
    num_tokens: int
    tokens_per_step: float
    bounds: tuple[float, float]
    tokens_per_step_not_looping: float  # over outputs that do not loop; nan if all loop
    bounds_not_looping: tuple[float, float]
    looping: float  # share of outputs that loop
    accepted: float  # share of the drafts
    tokens_per_second: float  # of a request, prefill and transport included
    speedup: float  # seconds per token without drafts / with them, over the same answers

    @classmethod
    def of(cls, answers: Sequence[ServedAnswer], plain: Sequence[ServedAnswer]) -> ServedRow:
        """Build the row from one setting's answers and those without drafts, in the same order."""
        steady = [answer for answer in answers if not is_looping(answer.ids)]
        num_tokens, seconds = sum(len(answer.ids) for answer in answers), sum(answer.seconds for answer in answers)
        return cls(
            temperature=answers[0].temperature,
            max_drafts=answers[0].max_drafts,
            num_outputs=len(answers),
            num_tokens=num_tokens,
            tokens_per_step=_tokens_per_step(answers),
            bounds=_bounds(answers),
            tokens_per_step_not_looping=_tokens_per_step(steady),
            bounds_not_looping=_bounds(steady),
            looping=1.0 - ratio(len(steady), len(answers)),
            accepted=ratio(sum(a.num_accepted for a in answers), sum(a.num_drafted for a in answers)),
            tokens_per_second=ratio(num_tokens, seconds),
            speedup=ratio(sum(answer.seconds for answer in plain), seconds),  # their tokens are the same
        )


def _tokens_per_step(answers: Sequence[ServedAnswer]) -> float:
    return ratio(sum(answer.num_decoded for answer in answers), sum(answer.num_steps for answer in answers))


def _bounds(answers: Sequence[ServedAnswer]) -> tuple[float, float]:
    by_conversation: dict[int, tuple[int, int]] = {}  # turns of a conversation are correlated
    for answer in answers:
        decoded, steps = by_conversation.get(answer.conversation, (0, 0))
        by_conversation[answer.conversation] = decoded + answer.num_decoded, steps + answer.num_steps
    return bootstrap(list(by_conversation.values()), statistic=ratio_of_sums)


class ServedAcceptance:
    """A server under measurement. A setting is (temperature, k); k = 0 is `speculation: off`."""

    def __init__(self, endpoint: Endpoint, options: argparse.Namespace, info: Mapping[str, Any], model: str) -> None:
        """`options`: of `spaceserve eval acceptance`; `info`: the server's /info; `model`: its name in requests."""
        self._endpoint, self._options, self.info, self._model = endpoint, options, info, model
        most = int((info.get("speculation") or {}).get("max_request") or 0)
        if not most:
            raise FlagError(
                f"{model} takes no `speculation: k`: it has no masks, or the server has --speculation off or "
                "--lookup only. Take a model with drafts (--model smollm2 has) and leave these flags out."
            )
        self._ks = (PLAIN, *sorted({min(k, most) for k in options.k} - {PLAIN}))
        file = None if options.out is None else options.out / "answers.jsonl"
        self._journal = Journal(file, lambda line: from_json(ServedAnswer, line).key)

    @classmethod
    async def connect(cls, options: argparse.Namespace) -> ServedAcceptance:
        """Read the facts of the server at --url. Raises HttpError, or FlagError if it takes no `speculation: k`."""
        endpoint = Endpoint.parse(options.url, read_api_key(options.api_key_file))
        if (info := await get_json(endpoint, "/info")).get("model_sha") is None:
            raise HttpError(f"{options.url} is not ready: it does not know its model yet.")
        return cls(endpoint, options, info, str((await get_json(endpoint, "/v1/models"))["data"][0]["id"]))

    async def measure(self, conversations: Sequence[Conversation]) -> list[ServedAnswer]:
        """Answer every turn of every conversation with every setting, `--at-once` conversations at a time. Answers in
        the journal of --out are kept.

        Raises TextsDiffer if drafts change an answer, JournalError if --out holds another run, and HttpError.
        """
        prompts = hashlib.sha256(repr([conversation.turns for conversation in conversations]).encode()).hexdigest()
        settings = {"model": self.info["model_sha"], "prompts": prompts[:12]}
        settings |= {name: getattr(self._options, name) for name in ("chat", "max_tokens", "seed")}
        self._journal.keep_settings(settings)
        gate = asyncio.Semaphore(self._options.at_once)
        num_turns = sum(len(self._turns(conversation)) for conversation in conversations)
        total = num_turns * len(self._ks) * len(self._options.temperature)
        with tqdm(total=total, desc=self._model, unit="answer", file=sys.stderr, disable=None) as bar:

            async def one(number: int, conversation: Conversation, temperature: float) -> list[ServedAnswer]:
                async with gate:
                    return await self._converse(number, conversation, temperature, bar.update)

            answered = await asyncio.gather(
                *(
                    one(number, conversation, temperature)
                    for temperature in self._options.temperature
                    for number, conversation in enumerate(conversations)
                )
            )
        return [answer for answers in answered for answer in answers]

    def _turns(self, conversation: Conversation) -> tuple[str, ...]:
        return conversation.turns if conversation.uses_template(self._options.chat) else conversation.turns[:1]

    async def _converse(
        self, number: int, conversation: Conversation, temperature: float, done: Callable[[], Any]
    ) -> list[ServedAnswer]:
        messages: list[dict[str, str]] = []
        answers = []
        for turn, text in enumerate(self._turns(conversation)):
            messages.append({"role": "user", "content": text})
            is_chat = conversation.uses_template(self._options.chat)
            question = {"messages": messages} if is_chat else {"prompt": text}
            plain: ServedAnswer | None = None
            for k in self._ks:
                key = (temperature, k, number, turn)
                if key not in self._journal:
                    self._journal.add(asdict(await self._ask(question, key)))
                answer = from_json(ServedAnswer, self._journal[key])
                plain = plain or answer
                if answer.ids != plain.ids or answer.text != plain.text:
                    raise TextsDiffer(
                        f"Prompt {number + 1}, turn {turn + 1}: k={k} gives another text than no drafts do."
                    )
                answers.append(answer)
                done()
            assert plain is not None
            messages.append({"role": "assistant", "content": plain.text})
        return answers

    async def _ask(self, question: Mapping[str, Any], key: tuple[float, int, int, int]) -> ServedAnswer:
        temperature, k, number, turn = key
        body = {
            **question,
            "model": self._model,
            "max_tokens": self._options.max_tokens,
            "temperature": temperature,
            "seed": self._options.seed + number,
            "speculation": k or "off",
            "return_token_ids": True,
        }
        is_chat = "messages" in question
        loop = asyncio.get_running_loop()
        started = loop.time()
        reply = await post_json(self._endpoint, "/v1/chat/completions" if is_chat else "/v1/completions", body)
        seconds = loop.time() - started
        choice, did = reply["choices"][0], reply["spaceserve"]
        return ServedAnswer(
            temperature=temperature,
            max_drafts=k,
            conversation=number,
            turn=turn,
            ids=tuple(choice["token_ids"]),
            text=(choice["message"]["content"] or "") if is_chat else choice["text"],
            num_steps=did["steps"],
            num_decoded=round((did["tokens_per_step"] or 0) * did["steps"]),
            num_drafted=did["drafted"],
            num_accepted=did["accepted"],
            seconds=seconds,
        )


def rows_of(answers: Sequence[ServedAnswer]) -> Iterator[ServedRow]:
    """Yield a row for each setting, by temperature and k."""
    by_setting: dict[tuple[float, int], list[ServedAnswer]] = {}
    for answer in sorted(answers, key=lambda answer: answer.key):
        by_setting.setdefault((answer.temperature, answer.max_drafts), []).append(answer)
    for (temperature, _), some in by_setting.items():
        yield ServedRow.of(some, by_setting[temperature, PLAIN])


def run(options: argparse.Namespace) -> int:
    """Print the table of the server at `options.url`. Return exit status 0, or 1 if drafts change a text."""
    conversations = load_conversations(options.prompts, options.limit)
    try:
        info, answers = asyncio.run(_measured(options, conversations))
    except HttpError as error:
        raise EvalError(str(error)) from error
    except TextsDiffer as error:
        print(f"spaceserve eval acceptance: {error}", file=sys.stderr)
        return 1
    rows = list(rows_of(answers))
    known = facts(info) | {
        "prompts": f"{options.prompts.name} ({len(conversations)})",
        "new tokens": options.max_tokens,
        "at once": options.at_once,
    }
    page = markdown_facts(known) + "\n" + columns_table(COLUMNS, rows)
    publish("acceptance", options.out, page, {"facts": known, "rows": [asdict(row) for row in rows]})
    return 0


async def _measured(
    options: argparse.Namespace, conversations: Sequence[Conversation]
) -> tuple[Mapping[str, Any], list[ServedAnswer]]:
    """Return the server's /info and its answers."""
    served = await ServedAcceptance.connect(options)
    return served.info, await served.measure(conversations)


def _with_bounds(value: float, bounds: tuple[float, float]) -> str:
    return f"{figure(value)} ({figure(bounds[0])}–{figure(bounds[1])})"


COLUMNS: Sequence[tuple[str, Callable[[ServedRow], str]]] = (
    ("T", lambda row: f"{row.temperature:g}"),
    ("k", lambda row: str(row.max_drafts)),
    ("outputs", lambda row: str(row.num_outputs)),
    ("tokens", lambda row: str(row.num_tokens)),
    ("tokens/step", lambda row: _with_bounds(row.tokens_per_step, row.bounds)),
    ("not looping", lambda row: _with_bounds(row.tokens_per_step_not_looping, row.bounds_not_looping)),
    ("looping", lambda row: f"{row.looping:.0%}"),
    ("accepted", lambda row: figure(row.accepted)),
    ("tokens/s", lambda row: f"{row.tokens_per_second:.1f}"),
    ("speed-up", lambda row: f"{row.speedup:.2f}"),
)
