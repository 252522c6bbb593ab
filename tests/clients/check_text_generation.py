"""TGI's own client, `text-generation`."""

import asyncio
import importlib.metadata
import re

from checks import ANSWER, KEY, NARROW_URL, PROMPT, URL, check, is_answer, leave, raises, until, version
from text_generation import AsyncClient, Client
from text_generation.errors import OverloadedError, ValidationError
from text_generation.types import Grammar, GrammarType, Message

version(importlib.metadata.version("text-generation"))
HEADERS = {"Authorization": f"Bearer {KEY}"}
client = Client(URL, headers=HEADERS, timeout=60)

with check("generate: tokens join to the text; prefill, top tokens, reason"):
    whole = client.generate(PROMPT, max_new_tokens=16, decoder_input_details=True, top_n_tokens=2)
    assert whole.generated_text
    assert "".join(token.text for token in whole.details.tokens) == whole.generated_text
    assert "".join(token.text for token in whole.details.prefill) == PROMPT
    assert [len(top) for top in whole.details.top_tokens] == [2] * whole.details.generated_tokens
    assert whole.details.finish_reason.value in ("length", "eos_token")
    assert whole.details.seed is None

with check("generate_stream: the same tokens, the text in the last event"):
    events = list(client.generate_stream(PROMPT, max_new_tokens=16))
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    assert "".join(event.token.text for event in events) == events[-1].generated_text == whole.generated_text
    assert events[-1].details.generated_tokens == len(events)

with check("sampling: seeds repeat, best_of keeps the best, full text and stop"):
    first = client.generate(PROMPT, do_sample=True, temperature=0.9, top_p=0.95, max_new_tokens=24)
    again = client.generate(PROMPT, temperature=0.9, top_p=0.95, max_new_tokens=24, seed=first.details.seed)
    assert again.generated_text == first.generated_text
    best = client.generate(PROMPT, do_sample=True, best_of=3, max_new_tokens=8)
    means = [
        sum(token.logprob for token in one.tokens) / len(one.tokens)
        for one in (best.details, *best.details.best_of_sequences)
    ]
    assert means == sorted(means, reverse=True)
    assert client.generate(PROMPT, max_new_tokens=16, return_full_text=True).generated_text == (
        PROMPT + whole.generated_text
    )
    stopped = client.generate("import os\nimport", max_new_tokens=40, stop_sequences=["\n"])
    assert stopped.details.finish_reason.value == "stop_sequence"
    assert "\n" not in stopped.generated_text

with check("a grammar holds the text to it"):
    spelled = client.generate(PROMPT, max_new_tokens=16, grammar=Grammar(type=GrammarType.Regex, value="[0-9]{3}"))
    assert re.fullmatch("[0-9]{3}", spelled.generated_text)
    shaped = client.generate(PROMPT, max_new_tokens=64, grammar=Grammar(type=GrammarType.Json, value=ANSWER))
    assert is_answer(shaped.generated_text)

with check("chat"):
    answer = client.chat([Message(role="user", content="def add(a, b):")], max_tokens=16, temperature=0.0)
    assert answer.choices[0].message.content
    assert answer.usage["completion_tokens"] <= 16

with check("ValidationError, also for a stream; OverloadedError"):
    raises(ValidationError, lambda: client.generate(PROMPT, max_new_tokens=100_000))
    raises(ValidationError, lambda: list(client.generate_stream(PROMPT, max_new_tokens=100_000)))
    narrow = Client(NARROW_URL, headers=HEADERS, timeout=60)
    busy = narrow.generate_stream(PROMPT, max_new_tokens=900)
    next(busy)
    raises(OverloadedError, lambda: narrow.generate(PROMPT))
    raises(OverloadedError, lambda: list(narrow.generate_stream(PROMPT)))

with check("cancellation: a closed stream leaves its place to others"):
    busy.close()

    def free() -> bool:
        try:
            return bool(narrow.generate(PROMPT, max_new_tokens=1).details.generated_tokens)
        except OverloadedError:
            return False

    until(free, "the place of a stream that was closed")


async def several() -> list[str]:
    """Four streams at once."""
    there = AsyncClient(URL, headers=HEADERS, timeout=60)

    async def one() -> str:
        return "".join([event.token.text async for event in there.generate_stream(PROMPT, max_new_tokens=16)])

    return await asyncio.gather(*(one() for _ in range(4)))


with check("AsyncClient: four streams at once, the same text"):
    assert set(asyncio.run(several())) == {whole.generated_text}

leave()
