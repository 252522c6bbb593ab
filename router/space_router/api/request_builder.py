"""Build a plan of valid engine requests from a checked body, or raise an error that names the field."""

import secrets
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from space_router.config import ServeConfig
from space_router.engine.request.request import Grammar, SamplingOptions, ServedLora, ValidRequest
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_router.errors import InvalidRequest, NotFound, TooManyTokens
from space_router.http_server.body import short_repr
from space_router.text import control_tokens
from space_router.text.control_tokens import RenderedPrompt
from space_router.text.fim import FillInTheMiddle
from space_router.text.model_text import ModelText
from space_router.text.reasoning import AnswerReasoning
from space_router.text.text_pieces import StretchTooLong
from space_router.text.text_stream import TextRules


@dataclass(frozen=True)
class Parameters:
    """Parameters of one generation before defaults are applied (None: not given)."""

    max_tokens: int | None = None
    limit_param: str = "max_tokens"  # the request field of max_tokens
    default_max_tokens: int | None = None  # if `max_tokens` is None; cut to what fits; None: all that fits
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    end_ids: Sequence[int] = ()  # additional EOS ids
    stop_token_ids: Sequence[int] | None = None
    stop: Any = None
    include_stop_str_in_output: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    grammar: Grammar | None = None  # already checked
    num_choices: int = 1  # generated for each prompt
    num_shown: int = 1
    seed: int | None = None
    num_logprobs: int | None = None  # None: no log-probabilities
    num_prompt_logprobs: int | None = None
    prediction: str | None = None  # text that the output is expected to contain
    speculation: str | int | None = None
    priority: int | None = None
    timeout: float | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    adapter: str = ""  # a valid name of a gated adapter or a LoRA; "" for none
    skip_special_tokens: bool | None = None
    shown_ids: frozenset[int] = frozenset()  # special tokens that are not skipped
    thinking: AnswerReasoning | None = None  # the reasoning that the output may begin with


@dataclass(frozen=True)
class Prompt:
    """One prompt: its ids, and the text that `echo` returns."""

    ids: tuple[int, ...]
    text: str
    param: str = "prompt"  # the request field of the prompt


@dataclass(frozen=True)
class PromptOptions:
    """How a prompt is tokenised. With `add_special_tokens` an empty string becomes a BOS."""

    param: str  # the request field of the prompt
    add_special_tokens: bool = False
    truncate: int | None = None  # keep so many of its last ids; -1: as many as leave room for `max_tokens`
    max_tokens: int = 1


@dataclass(frozen=True)
class PlannedChoice:
    """One choice for one prompt: one request to the engine."""

    index: int  # among the choices of its HTTP request
    prompt: Prompt
    request: ValidRequest
    rules: TextRules

    def ending_in_prompt(self) -> "PlannedChoice":
        """Return a choice in which the engine generates the prompt's last id, as its only allowed token.

        For a request that wants only prompt log-probabilities of a prompt that fills the window. The result is exact,
        because log-probabilities are the model's own and ignore `allowed_ids`.
        """
        request = self.request
        *before, last = request.prompt_ids
        sampling = SamplingOptions(seed=request.sampling.seed, choice=request.sampling.choice, allowed_ids=(last,))
        changed = replace(
            request,
            prompt_ids=tuple(before),
            sampling=sampling,
            eos_ids=(),
            stop_ids=(),
            max_draft_length=0,
            num_forced_drafts=0,
            prediction=None,
            want_logprobs=request.num_prompt_logprobs is not None,
            num_logprobs=request.num_prompt_logprobs or 0,
            stops_on_text=False,
        )
        return replace(self, request=changed, rules=TextRules())

    @property
    def ends_in_prompt(self) -> bool:
        """Whether the engine's one token is the prompt's last."""
        return len(self.request.prompt_ids) < len(self.prompt.ids)


@dataclass(frozen=True)
class GenerationPlan:
    """All choices of one HTTP request, grouped by prompt, choice 0 of each prompt first."""

    request_id: str  # the client's, or a generated one
    seed: int  # the client's, or a fresh one
    prompts: tuple[Prompt, ...]
    choices: tuple[PlannedChoice, ...]  # of each prompt equally many
    num_shown: int  # choices returned for each prompt; fewer than generated with best_of
    limit_param: str  # the request field of max_tokens
    answered: bool  # False: max_tokens is 0, and the engine's one token is not returned

    @property
    def per_prompt(self) -> int:
        """Number of choices for each prompt."""
        return len(self.choices) // len(self.prompts)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are requested; the first choice of each prompt has them."""
        return self.choices[0].request.num_prompt_logprobs is not None


@dataclass(frozen=True)
class Infill:
    """A tokenised suffix, to be joined to prompts."""

    tokens: FillInTheMiddle
    suffix_ids: tuple[int, ...]
    num_tokens: int  # that it adds to a prompt

    def joined(self, prompt: Prompt, bos_id: int | None) -> Prompt:
        """Return the prompt joined with the suffix. A BOS stays first; `echo` still returns only the prompt."""
        num_bos = int(prompt.ids[:1] == (bos_id,))
        joined = self.tokens.ids(prompt.ids[num_bos:], self.suffix_ids)
        return replace(prompt, ids=(*prompt.ids[:num_bos], *joined))


MAX_STOP_LENGTH = 1024  # characters of a stop string
_LEAST_PENALTY = 1e-6  # a smaller repetition penalty has no further effect and would make logits infinite
_SMALLEST = 1e-30  # of positive parameters: not rounded to 0 in float32, where 0 means unset
NAMELESS = frozenset({"tgi", "dummy"})
"""Values of `model` that Hugging Face's clients send if they know only the server's address: the served model."""


def choice_id(request_id: str, index: int) -> str:
    """Return the engine's request id for one of several choices. It cannot equal a client's request id."""
    return f"{request_id}/{index}"


@contextmanager
def refuse_surrogates(param: str) -> Iterator[None]:
    """Wraps tokenisation of `param`: raises InvalidRequest for a lone surrogate and for a text that cannot be cut."""
    try:
        yield
    except UnicodeEncodeError:
        raise InvalidRequest(f"`{param}` holds half of a surrogate pair; send UTF-8.", param=param) from None
    except StretchTooLong as error:
        raise InvalidRequest(f"`{param}` {error}", param=param) from None


def served_names(config: ServeConfig, text: ModelText) -> tuple[str, ...]:
    """Return the model's names, the first one first."""
    return tuple(dict.fromkeys((text.name, *config.model_names[1:])))


def without_base(name: str, names: Sequence[str]) -> str:
    """Return the NAME of MODEL:NAME, for each of the model's names."""
    bases = [f"{base}:" for base in names if name.startswith(f"{base}:")]
    return name.removeprefix(max(bases, key=len, default=""))


def model_not_found(name: str, served: Sequence[str], param: str | None = "model") -> NotFound:
    """Return the error for a model name that is not served."""
    names = " and ".join(filter(None, (", ".join(f"`{one}`" for one in served[:-1]), f"`{served[-1]}`")))
    message = f"The model {short_repr(name)} is not served here; {names} {'is' if len(served) == 1 else 'are'}."
    return NotFound(message, param=param, code="model_not_found")


def max_forced_drafts(config: ServeConfig, facts: WorkerModelFacts, adapter: str = "") -> int:
    """Return the largest number that a request's `speculation` may be; 0: none."""
    bounds = (facts.max_forced_drafts(adapter), config.max_draft_length, config.max_request_speculation)
    return min(bound for bound in bounds if bound is not None)


@dataclass(frozen=True)
class RequestBuilder:
    """Builds plans from parameters and prompts, for one model and config."""

    config: ServeConfig
    text: ModelText
    facts: WorkerModelFacts
    key: str = ""  # name of the client's API key
    loras: Mapping[str, ServedLora] = field(default_factory=lambda: MappingProxyType({}))  # by name

    def adapter(self, name: str | None, param: str = "model", *, others: Sequence[str] = ()) -> str:
        """Return the gated adapter or LoRA that `model` selects (NAME or MODEL:NAME), or "" for the model itself.
        `others`: names of what else the route takes. Raises NotFound."""
        known = (*self.facts.adapters, *self.loras)
        names = served_names(self.config, self.text)
        if name is None or name in names:
            return ""
        chosen = without_base(name, (*names, *self.config.unlisted_names))
        if chosen in known:
            return chosen
        if name == self.config.embedding_model_name:
            raise InvalidRequest(
                f"`{name}` makes no text: it is for /v1/embeddings, /v1/rerank and /v1/score. Name another model.",
                param=param,
                code="unsupported_model",
            )
        unlisted = name in NAMELESS or name in self.config.unlisted_names
        if param == "model" and (unlisted or self.config.takes_any_name):
            return ""
        raise model_not_found(chosen, (*names, *known, *others), param)

    def prompts(self, value: Any, options: PromptOptions, infill: Infill | None = None) -> list[Prompt]:
        """Build prompts from a string, a list of strings, token ids, or a list of these; `infill` adds a suffix."""
        param = options.param
        if isinstance(value, str):
            values: list[Any] = [value]
        elif isinstance(value, list) and value and all(type(part) is int for part in value):
            values = [value]
        elif isinstance(value, list) and value and all(isinstance(part, str | list) for part in value):
            values = value
        else:
            raise InvalidRequest(
                f"`{param}` must be a string, a list of strings, token ids or a list of lists of token ids, and not "
                f"empty; got {short_repr(value)}.",
                param=param,
            )
        if len(values) > self.config.max_choices:
            raise InvalidRequest(
                f"`{param}` has {len(values)} prompts; at most {self.config.max_choices} in one request.", param=param
            )
        made = [self.prompt(part, options, 0 if infill is None else infill.num_tokens) for part in values]
        return made if infill is None else [infill.joined(prompt, self.text.tokenizer.bos_id) for prompt in made]

    def prompt(self, value: Any, options: PromptOptions, reserved: int = 0) -> Prompt:
        """Build one prompt from a string, a rendered conversation or token ids.

        `reserved`: number of ids that are added later.
        """
        tokenizer, param, truncate = self.text.tokenizer, options.param, options.truncate
        if isinstance(value, RenderedPrompt) and value.control is None:
            value = value.text
        if isinstance(value, RenderedPrompt):
            rendered, value = value, value.text
            self._check_characters(value, truncate, param)
            ids = [id_ for id_, _, _ in self.rendered_spans(rendered, options)]
            self._check_rows(ids, param)
        elif isinstance(value, str):
            self._check_characters(value, truncate, param)
            with refuse_surrogates(param):
                ids = tokenizer.encode(value, add_special_tokens=options.add_special_tokens)
            self._check_rows(ids, param)
        elif all(type(id_) is int for id_ in value):
            ids = self.check_ids(value, param)
        else:
            raise InvalidRequest(f"`{param}` mixes token ids with other things; got {short_repr(value)}.", param=param)
        self._check_masks(ids, param)
        if not ids and not reserved:
            may_begin = isinstance(value, str) and options.add_special_tokens
            if not may_begin or tokenizer.bos_id is None:
                why = ", and the tokenizer has no BOS to begin with" if may_begin else ""
                raise InvalidRequest(f"`{param}` has no tokens{why}; give at least one.", param=param)
            self._check_rows([tokenizer.bos_id], param)
            ids = [tokenizer.bos_id]
        most = len(ids) if truncate is None else self._room(truncate, options.max_tokens, reserved)
        cut = len(ids) > most
        kept = ids[len(ids) - most :] if cut else ids
        text = value if isinstance(value, str) and not cut else tokenizer.decode(kept)
        return Prompt(tuple(kept), text, param)

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that text of messages never becomes: special tokens and masks."""
        return self.text.tokenizer.special_ids | self._masks

    def rendered_spans(self, prompt: RenderedPrompt, options: PromptOptions) -> list[tuple[int, int, int]]:
        """Return (id, start, end) of each token of a rendered conversation, in characters. Raises InvalidRequest."""
        with refuse_surrogates(options.param):
            return control_tokens.encode(
                self.text.tokenizer, prompt, self.control_ids, add_special_tokens=options.add_special_tokens
            )

    def _room(self, truncate: int, max_tokens: int, reserved: int) -> int:
        """Return how many of its ids a truncated prompt keeps at most. Raises InvalidRequest if none are left."""
        room = self.longest - max(1, max_tokens) if truncate == -1 else truncate
        if room - reserved < (not reserved):
            what = f"{reserved} tokens of `suffix`" if reserved else f"`max_tokens` {max_tokens}"
            raise InvalidRequest(
                f"`truncate_prompt_tokens` is {truncate}, which leaves nothing of a prompt beside {what}; this model "
                f"takes {self.facts.window}.",
                param="truncate_prompt_tokens",
            )
        return room - reserved

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and output together."""
        return min(self.facts.window, self.facts.num_slots - 1)

    def infill(self, suffix: str | None) -> Infill | None:
        """Return the Infill for a suffix, or None. Raises InvalidRequest if the tokenizer has no infill tokens."""
        if not suffix:
            return None
        tokens = FillInTheMiddle.of(self.text.tokenizer)
        if tokens is None:
            raise InvalidRequest(
                f"`suffix` is not supported by `{self.text.name}`: its tokenizer has no fill-in-the-middle tokens. "
                "Leave it out.",
                param="suffix",
                code="unsupported_parameter",
            )
        self._check_characters(suffix, None, "suffix")
        with refuse_surrogates("suffix"):
            ids = self.text.tokenizer.encode_inside(suffix)
        self._check_rows([*tokens.ids(ids, ())], "suffix")
        self._check_masks(ids, "suffix")
        return Infill(tokens, tuple(ids), tokens.num_tokens + len(ids))

    def plan(self, prompts: Sequence[Prompt], wanted: Parameters, *, prefix: str) -> GenerationPlan:
        """Build one engine request for each choice of each prompt. Raises InvalidRequest naming the field."""
        count = wanted.num_choices
        if count * len(prompts) > self.config.max_choices:
            raise InvalidRequest(
                f"`n` (or `best_of`) is {count} with {len(prompts)} prompt{'s' * (len(prompts) > 1)}, which makes "
                f"{count * len(prompts)} choices; at most {self.config.max_choices} in one request (`--max-choices`).",
                param="n",
            )
        seed = secrets.randbits(53) if wanted.seed is None else wanted.seed  # 53 bits are exact in every JSON reader
        request_id = wanted.request_id or f"{prefix}{uuid.uuid4().hex}"
        sampling = self._sampling(wanted, seed)
        rules = TextRules(
            stops=self._stops(wanted.stop),
            keep_stop=bool(wanted.include_stop_str_in_output),
            min_tokens=wanted.min_tokens or 0,
            skip_special_tokens=wanted.skip_special_tokens is not False,
            shown_ids=wanted.shown_ids,
            thinking=wanted.thinking,
        )
        max_tokens = wanted.default_max_tokens if wanted.max_tokens is None else wanted.max_tokens
        if max_tokens is not None and (wanted.min_tokens or 0) > max_tokens:
            raise InvalidRequest(
                f"`min_tokens` is {wanted.min_tokens}, above the {max_tokens} of `{wanted.limit_param}`.",
                param="min_tokens",
            )
        lora = self.loras.get(wanted.adapter)
        adapter = wanted.adapter if lora is None else ""
        max_drafts, num_forced = self._speculation(wanted.speculation, adapter)
        prediction = self._prediction(wanted.prediction)
        stop_ids = tuple(dict.fromkeys(self.check_ids(wanted.stop_token_ids or (), "stop_token_ids")))
        choices = []
        for index in range(count * len(prompts)):
            prompt, choice = prompts[index // count], index % count
            request = ValidRequest(
                request_id=request_id if count * len(prompts) == 1 else choice_id(request_id, index),
                prompt_ids=prompt.ids,
                sampling=replace(sampling, choice=choice),
                max_tokens=self._limit(wanted, len(prompt.ids)),
                eos_ids=() if wanted.ignore_eos else self.end_ids(wanted.end_ids),
                stop_ids=stop_ids,
                max_draft_length=max_drafts,
                num_forced_drafts=num_forced,
                prediction=prediction,
                want_logprobs=wanted.num_logprobs is not None,
                num_logprobs=wanted.num_logprobs or 0,
                num_prompt_logprobs=wanted.num_prompt_logprobs if choice == 0 else None,
                priority=wanted.priority or 0,
                deadline=wanted.timeout,
                cache_salt=wanted.cache_salt or "",
                adapter=adapter,
                lora=lora,
                key=self.key,
                stops_on_text=bool(rules.stops),
            )
            made = PlannedChoice(index, prompt, request, rules)
            fills_window = len(prompt.ids) == self.facts.window > 1
            choices.append(made.ending_in_prompt() if fills_window and max_tokens == 0 else made)
        limit_param, answered = wanted.limit_param, max_tokens != 0
        return GenerationPlan(request_id, seed, tuple(prompts), tuple(choices), wanted.num_shown, limit_param, answered)

    def end_ids(self, more: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the EOS ids, and those of `more` that the model can generate: not masks, and within its vocabulary."""
        possible = (id_ for id_ in more if id_ < self.facts.vocab_size and id_ not in self._masks)
        return tuple(dict.fromkeys((*self.facts.eos_ids, *possible)))

    def _limit(self, wanted: Parameters, num_prompt: int) -> int | None:
        """Return the engine's `max_tokens`, at least 1. A default is cut to the window; None: as many as fit."""
        if wanted.max_tokens is not None:
            return max(1, wanted.max_tokens)
        default = wanted.default_max_tokens
        return None if default is None else max(1, min(default, self.longest - num_prompt))

    def check_ids(self, ids: Sequence[int], param: str) -> list[int]:
        """Return the ids as a list. Raises InvalidRequest for an id outside the model's vocabulary."""
        if ids and not 0 <= min(ids) <= max(ids) < self.facts.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidRequest(
                f"`{param}` holds the token id {short_repr(wrong)}; ids of this model are 0 to "
                f"{self.facts.vocab_size - 1}.",
                param=param,
            )
        return list(ids)

    def _check_rows(self, ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for tokens of text outside the model's vocabulary; the tokenizer may be larger."""
        if ids and (wrong := max(ids)) >= self.facts.vocab_size:
            raise InvalidRequest(
                f"`{param}` holds {short_repr(self.text.tokenizer.token_text(wrong))}, which the tokenizer makes the "
                f"token id {wrong}; ids of this model are 0 to {self.facts.vocab_size - 1}. Leave it out, or serve the "
                "model with the tokenizer that it was trained with.",
                param=param,
            )

    def _check_masks(self, ids: Sequence[int], param: str) -> None:
        if masks := self._masks.intersection(ids):
            text = self.text.tokenizer.token_text(min(masks))
            raise InvalidRequest(
                f"`{param}` holds the mask token {min(masks)} ({short_repr(text)}), which is for drafting only. Leave "
                "it out.",
                param=param,
            )

    @property
    def _masks(self) -> frozenset[int]:
        return frozenset(self.facts.mask_ids)

    def _check_characters(self, text: str, truncate: int | None, param: str) -> None:
        """Refuse a prompt that cannot fit before it is tokenised: no known token is longer than 256 bytes."""
        if truncate is None and len(text) > 256 * self.facts.window:
            at_least = len(text) // 256
            raise TooManyTokens(
                f"This model's maximum context length is {self.facts.window} tokens. The prompt has {len(text)} "
                f"characters, at least {at_least} tokens. Shorten it or set `truncate_prompt_tokens`.",
                num_prompt=at_least,
                limit=self.facts.window,
                param=param,
            )

    def _sampling(self, wanted: Parameters, seed: int) -> SamplingOptions:
        defaults = self.text.sampling_defaults
        penalty = wanted.repetition_penalty or defaults.get("repetition_penalty", 1.0)

        def chosen(name: str, value: float | None, neutral: float) -> float:
            return defaults.get(name, neutral) if value is None else value

        return SamplingOptions(
            seed=seed % 2**64,
            temperature=float(chosen("temperature", wanted.temperature, 1.0)),
            top_k=max(0, int(chosen("top_k", wanted.top_k, 0))),
            top_p=max(_SMALLEST, float(chosen("top_p", wanted.top_p, 1.0))),
            min_p=float(chosen("min_p", wanted.min_p, 0.0)),
            typical_p=max(_SMALLEST, float(chosen("typical_p", wanted.typical_p, 1.0))),
            repetition_penalty=max(_LEAST_PENALTY, float(penalty)),
            presence_penalty=wanted.presence_penalty or 0.0,
            frequency_penalty=wanted.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(wanted.logit_bias or {}),
            allowed_ids=self._allowed(wanted.allowed_token_ids),
            grammar=wanted.grammar,
            bad_words=self._bad_words(wanted.bad_words or ()),
            min_tokens=wanted.min_tokens or 0,
        )

    def _logit_bias(self, bias: Mapping[str, float]) -> Mapping[int, float]:
        values: dict[int, float] = {}
        for key, value in bias.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise InvalidRequest(
                    f"`logit_bias` must map token ids to numbers; got the key {short_repr(key)}.", param="logit_bias"
                )
            values[int(key)] = float(value)
        self.check_ids(list(values), "logit_bias")
        return MappingProxyType(values)

    def _allowed(self, ids: Sequence[int] | None) -> tuple[int, ...]:
        if ids is None:
            return ()
        allowed = tuple(dict.fromkeys(self.check_ids(ids, "allowed_token_ids")))
        if self._masks.issuperset(allowed):
            message = "`allowed_token_ids` allows mask tokens only, which are never sampled."
            raise InvalidRequest(message, param="allowed_token_ids")
        return allowed

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return each word's ids, at the start of a text and after a space; once if both are equal."""
        runs: dict[tuple[int, ...], None] = {}
        for word in words:
            for form in (word, " " + word.lstrip()):
                if ids := self.text.tokenizer.encode(form, add_special_tokens=False):
                    self._check_rows(ids, "bad_words")
                    runs[tuple(ids)] = None
        return tuple(runs)

    def _stops(self, stop: Any) -> tuple[str, ...]:
        stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
        limit = self.config.max_stop_strings
        if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops[: limit + 1]):
            raise InvalidRequest(f"`stop` must be a string or a list of strings; got {short_repr(stop)}.", param="stop")
        if len(stops) > limit:
            raise InvalidRequest(
                f"`stop` has {len(stops)} strings; at most {limit} are taken (`--max-stop-strings`).", param="stop"
            )
        for text in stops:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"Each string of `stop` must have 1 to {MAX_STOP_LENGTH} characters; got {len(text)}.", param="stop"
                )
        return tuple(dict.fromkeys(stops))

    def _prediction(self, text: str | None) -> tuple[int, ...] | None:
        """Return the ids of a predicted text. Raises InvalidRequest if no output can contain it."""
        if text is None:
            return None
        window = self.facts.window
        with refuse_surrogates("prediction"):
            ids = self.text.tokenizer.encode(text, add_special_tokens=False) if len(text) <= 256 * window else None
        if ids is None or len(ids) > window:
            size = f"{len(text)} characters" if ids is None else f"{len(ids)} tokens"
            raise InvalidRequest(
                f"`prediction` has {size}; this model's window is {window} tokens. Shorten it.", param="prediction"
            )
        self._check_rows(ids, "prediction")
        if masks := self._masks.intersection(ids):
            raise InvalidRequest(
                f"`prediction` holds the mask token {min(masks)}, which is never sampled. Leave it out.",
                param="prediction",
            )
        return tuple(ids)

    def _speculation(self, wanted: str | int | None, adapter: str) -> tuple[int | None, int]:
        """Return the most drafts per step (None: the worker chooses) and how many from masks are forced (0: none)."""
        if wanted is None or wanted == "auto":
            return self.config.max_draft_length, 0
        if isinstance(wanted, str) or wanted == 0:
            return 0, 0
        most = max_forced_drafts(self.config, self.facts, adapter)
        if wanted > most:
            raise InvalidRequest(
                f"`speculation` is {short_repr(wanted)}: {self._why_not_forced(most, adapter)}. The text is the same "
                "with each.",
                param="speculation",
            )
        return wanted, wanted

    def _why_not_forced(self, most: int, adapter: str) -> str:
        """Return why a request cannot have more than `most` forced drafts, and what it can have."""
        if most:
            return f'at most {most} draft{"s" * (most > 1)} per step can be asked for here; send that, "auto" or "off"'
        if self.config.max_draft_length == 0:
            reason = "this server decodes plainly (`--speculation off`)"
        elif self.config.max_request_speculation == 0:
            reason = "this server lets no request choose its drafts (`--max-request-speculation 0`)"
        elif not self.facts.num_masks_of(adapter) and not self.facts.num_head_drafts_of(adapter):
            reason = f"`{adapter or self.text.name}` has no masks to draft from"
        elif not self.facts.lays_out_masks:
            reason = "the workers lay out no masks (`--lookup only`)"
        else:
            reason = "the workers decode plainly (`--speculation off`)"
        return f'{reason}; leave it out, or send "auto" or "off"'
