"""lm-eval's `local-completions`, against transformers on the same checkpoint in float32."""

import importlib.metadata
import importlib.resources
import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from checks import KEY, MODEL, URL, check, leave, version
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

os.environ["OPENAI_API_KEY"] = KEY
version(importlib.metadata.version("lm-eval"))
FOLDER = str(importlib.resources.files("space_demo"))
PAIRS = [
    ("def add(a, b):\n    return", " a + b"),
    ("def add(a, b):\n    return", " a * b"),
    ("import", " os"),
    ("import", " numpy as np\n"),
    ("for i in range(10):\n    print(", "i)"),
    ("class Point:\n    def __init__(self, x, y):\n        self.x =", " x\n        self.y = y"),
    ("# Grüße, 世界\nx =", " 'ñandú 🙂'"),
    ("x = 1\n" * 60 + "y", " = 2"),
]
tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def server(**options: Any) -> LocalCompletionsAPI:
    settings = {"tokenizer_backend": "huggingface", "tokenizer": FOLDER, "max_length": 1024, **options}
    return LocalCompletionsAPI(base_url=URL + "/v1/completions", model=MODEL, **settings)


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, place) for place, one in enumerate(arguments)]


def by_transformers(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Sum of log-probabilities of the continuation's ids, and whether each is the most probable."""
    with torch.inference_mode():
        logits = model(torch.tensor([context + continuation])).logits[0].double()
    known, wanted = torch.log_softmax(logits, -1)[len(context) - 1 : -1], torch.tensor(continuation)
    return float(known.gather(1, wanted[:, None]).sum()), bool((known.argmax(-1) == wanted).all())


def encoded(context: str, continuation: str) -> tuple[list[int], list[int]]:
    """As lm-eval splits a pair, also where one token of the whole reaches over the border."""
    before = tokenizer.encode(context)
    return before, tokenizer.encode(context + continuation)[len(before) :]


with check("loglikelihood equals transformers' to 1e-4, and so does what is greedy"):
    got = server().loglikelihood(asked("loglikelihood", *PAIRS))
    for pair, (value, greedy) in zip(PAIRS, got, strict=True):
        wanted, most_probable = by_transformers(*encoded(*pair))
        assert abs(value - wanted) <= 1e-4, (pair, value, wanted)
        assert greedy == most_probable, pair
    assert {greedy for _, greedy in got} == {True, False}

with check("several requests at once and in batches give the same"):
    batched = server(batch_size=4, num_concurrent=3).loglikelihood(asked("loglikelihood", *PAIRS))
    for one, other in zip(got, batched, strict=True):
        assert abs(one[0] - other[0]) <= 1e-6
        assert one[1] == other[1]

with check("loglikelihood_rolling equals transformers' to 1e-4"):
    texts = [context + continuation for context, continuation in PAIRS]
    rolling = server().loglikelihood_rolling(asked("loglikelihood_rolling", *((text,) for text in texts)))
    for text, value in zip(texts, rolling, strict=True):
        wanted, _ = by_transformers([tokenizer.eos_token_id], tokenizer.encode(text))
        assert abs(value - wanted) <= 1e-4, (text, value, wanted)

with check("generate_until gives what transformers generates greedily"):
    arguments = [(context, {"until": ["\n\n"], "max_gen_toks": 20}) for context, _ in PAIRS[:4]]
    written = server().generate_until(asked("generate_until", *arguments))
    for (context, _), text in zip(arguments, written, strict=True):
        ids = torch.tensor([tokenizer.encode(context)])
        with torch.inference_mode():
            made = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
        assert text == tokenizer.decode(made, skip_special_tokens=True).split("\n\n")[0], (context, text)

with check("the server's own tokenizer serves as well as a local one"):
    remote = server(tokenizer_backend="remote", auth_token=KEY)
    assert remote.tok_encode("def add(a, b):") == tokenizer.encode("def add(a, b):")
    assert remote.loglikelihood(asked("loglikelihood", *PAIRS[:3])) == got[:3]

leave()
