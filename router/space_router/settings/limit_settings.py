"""The group `limits` of `ServeConfig`."""

from dataclasses import dataclass

from space_router.settings import parse
from space_router.settings.setting import setting

_GROUP = "limits"


@dataclass(frozen=True)
class LimitSettings:
    """Limits of the queue, of one request, and of one API key."""

    max_queue: int = setting(
        256,
        _GROUP,
        "most requests waiting; the next one gets 429 with Retry-After at once instead of waiting unboundedly. The "
        "choices of one prompt (`n`) wait as one",
        parse.whole(0, 1_000_000),
        "REQUESTS",
    )
    max_queue_tokens: int = setting(
        1_000_000,
        _GROUP,
        "most prompt tokens waiting, so that a few hundred long prompts do not make a queue of hours; beyond it 429 as "
        "well. A request that waits alone may be of any length",
        parse.whole(1, 10**12),
        "TOKENS",
    )
    priority_ageing: float = setting(
        30.0,
        _GROUP,
        "seconds of waiting after which a request moves up one level of `priority`, up to the most urgent that anybody "
        "waits in; so no priority starves. Shorter: priorities mean less under load",
        parse.seconds(0.001),
        "SECONDS",
    )
    max_choices: int = setting(
        16, _GROUP, "largest `n` or `best_of` of a request, and most prompts in one", parse.whole(1, 1024), "CHOICES"
    )
    max_stop_strings: int = setting(
        4, _GROUP, "most stop strings of a request; the default is OpenAI's", parse.whole(1, 1024), "STRINGS"
    )
    max_json_depth: int = setting(
        128,
        _GROUP,
        "deepest nesting of lists and objects in a body; JSON schemas of tools need two levels for each of their own",
        parse.whole(4, 512),
        "LEVELS",
    )
    key_requests_per_minute: int | None = setting(
        None,
        _GROUP,
        "requests that generate, per minute and API key (or of all clients together, where there are no keys); beyond "
        "them 429 with Retry-After. A minute's worth may come at once. --api-key-file may say otherwise for a key",
        parse.whole(1, 1_000_000_000),
        "REQUESTS",
    )
    key_tokens_per_minute: int | None = setting(
        None,
        _GROUP,
        "tokens of prompts and outputs, per minute and API key. Outputs are charged as they end, so a key may overdraw "
        "and then waits until that is paid off",
        parse.whole(1, 1_000_000_000_000),
        "TOKENS",
    )
    key_concurrency: int | None = setting(
        None,
        _GROUP,
        "requests that one API key may have waiting or running at once",
        parse.whole(1, 1_000_000),
        "REQUESTS",
    )
