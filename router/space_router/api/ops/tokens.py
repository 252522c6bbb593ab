"""`POST /tokenize`, `POST /chat_tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from collections import deque
from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response, StreamingResponse

from space_router.api.openai.chat import conversation_text
from space_router.api.openai.fields import CHAT_NEUTRAL, ChatBody, TokenId
from space_router.api.request_builder import PromptOptions, RequestBuilder, refuse_surrogates
from space_router.api.schema import (
    Count,
    OpenAIError,
    ResponseModel,
    TgiError,
    describe_responses,
    json_body,
    schema_ref,
)
from space_router.api.service import Service
from space_router.api.tgi.generate import GENERATE_NEUTRAL, GenerateParameters, Settings
from space_router.errors import InvalidRequest
from space_router.http_server.body import Body, BodyT, Neutral, read_object, validate
from space_router.http_server.responses import json_response, key_of

STATUSES = (404, 413, 415, 422, 429, 503)
MAX_TOKENS = 2**20  # of one answer
STRINGS = "adds `token_strs`, the tokens as the vocabulary writes them; goes with `prompt` and `messages`"


class TokenizeBody(Body):
    """`inputs` is answered as TGI does, `prompt` and `messages` as OpenAI-like servers do."""

    model: Annotated[str, Field(max_length=512)] | None = None
    inputs: str | None = None
    prompt: str | None = None
    messages: Annotated[
        Any,
        Field(description="a conversation, with the other fields of a chat completion, such as `tools`"),
        WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}, "minItems": 1}, {"type": "null"}]}),
    ] = None
    add_generation_prompt: Annotated[bool | None, Field(description="goes with `messages`")] = None
    add_special_tokens: bool | None = None
    return_token_strs: Annotated[bool | None, Field(description=STRINGS)] = None
    parameters: Settings | None = None  # as for `/generate`; only `truncate` has an effect


class TokenizedChatBody(ChatBody):
    """A conversation to tokenise."""

    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Ids to text."""

    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKENS)]
    skip_special_tokens: bool | None = None


class PlacedToken(ResponseModel):
    """A token and the characters of the text that it stands for."""

    id: Count
    text: str
    start: Count
    stop: Count


class TokenIds(ResponseModel):
    """The ids of a text."""

    tokens: list[Count]
    count: Count
    max_model_len: Count
    token_strs: list[str] | None = None


class ConversationTokens(ResponseModel):
    """A conversation as the prompt it becomes."""

    tokenize_response: list[PlacedToken]
    templated_text: str


class TokenizerInfo(ResponseModel):
    """What a client needs to know of the tokenizer."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class Detokenized(ResponseModel):
    """The text of ids."""

    prompt: str


def _ids(builder: RequestBuilder, text: str, *, add_special_tokens: bool, with_strings: bool) -> list[bytes]:
    """Return the ids of a text as OpenAI-like servers write them, in pieces of JSON."""
    written, strings, count = _JsonList(), _JsonList(), 0
    with refuse_surrogates("prompt"):
        for ids in builder.text.tokenizer.encode_pieces(text, add_special_tokens=add_special_tokens):
            count += len(ids)
            _check_count(count, "prompt")
            written.add(ids)
            if with_strings:
                strings.add(builder.text.tokenizer.vocabulary_texts(ids))
    end = f'],"count":{count},"max_model_len":{builder.facts.window}'.encode()
    more = [b',"token_strs":', *strings.pieces, b"]"] if with_strings else []
    return [b'{"tokens":', *written.pieces, end, *more, b"}"]


def _conversation_ids(builder: RequestBuilder, body: TokenizedChatBody) -> list[bytes]:
    """Return the ids that a chat completion gives the model, in the same form."""
    special = bool(body.add_special_tokens)  # the template already writes special tokens
    options = PromptOptions("messages", special, body.truncate_prompt_tokens)
    ids = builder.prompt(conversation_text(builder, body), options).ids
    made: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": builder.facts.window}
    if body.return_token_strs:
        made["token_strs"] = builder.text.tokenizer.vocabulary_texts(ids)
    return [orjson.dumps(made)]


def _spans(builder: RequestBuilder, text: str, options: PromptOptions) -> list[bytes]:
    """Return the tokens of a text in TGI's format, in pieces of JSON."""
    # The last ones only, with `truncate`: whole pieces are left out as soon as those behind them are enough.
    kept: deque[tuple[int, bytes]] = deque()
    num_kept = 0
    with refuse_surrogates(options.param):
        for spans in builder.text.tokenizer.encode_span_pieces(text, add_special_tokens=options.add_special_tokens):
            if not spans:
                continue
            kept.append((len(spans), _json(text, spans)))
            num_kept += len(spans)
            while options.truncate is not None and num_kept - kept[0][0] >= options.truncate:
                num_kept -= kept.popleft()[0]
            _check_count(num_kept, options.param)
    if options.truncate is not None and num_kept > options.truncate:
        _, first = kept.popleft()
        rest = orjson.loads(first)[num_kept - options.truncate :]
        kept.appendleft((len(rest), orjson.dumps(rest)))
    written = _JsonList()
    while kept:
        written.append(kept.popleft()[1])
    return [*written.pieces, b"]"]


def _json(text: str, spans: list[tuple[int, int, int]]) -> bytes:
    return orjson.dumps(
        [{"id": id_, "text": text[start:end], "start": start, "stop": end} for id_, start, end in spans]
    )


class _JsonList:
    """A JSON list, written piece by piece: it is never there as Python objects, which take ten times its memory."""

    def __init__(self) -> None:
        self.pieces = [b"["]  # the closing bracket is the caller's

    def add(self, values: list[Any]) -> None:
        self.append(orjson.dumps(values))

    def append(self, written: bytes) -> None:
        """Append the entries of a list that is written already."""
        if len(written) > 2:
            self.pieces += [b"," if len(self.pieces) > 1 else b"", written[1:-1]]


def _check_count(num_tokens: int, param: str) -> None:
    if num_tokens > MAX_TOKENS:
        message = f"`{param}` has more than {MAX_TOKENS} tokens, the most of one answer. Split it."
        raise InvalidRequest(message, param=param)


def _conversation(builder: RequestBuilder, body: ChatBody) -> list[bytes]:
    """Return a conversation as rendered by the chat template, and its tokens, in pieces of JSON."""
    prompt = conversation_text(builder, body)
    special = bool(body.add_special_tokens)  # the template already writes special tokens
    options = PromptOptions("messages", special, body.truncate_prompt_tokens)
    if prompt.control is None:
        spans = _spans(builder, prompt.text, options)
    else:  # of bounded length
        placed = builder.rendered_spans(prompt, options)
        spans = [_json(prompt.text, placed if options.truncate is None else placed[-options.truncate :])]
    return [b'{"tokenize_response":', *spans, b',"templated_text":', orjson.dumps(prompt.text), b"}"]


def _answer(pieces: list[bytes]) -> Response:
    """Return a response of these pieces of JSON, each freed once it is sent."""

    async def sent() -> AsyncIterator[bytes]:
        for place, piece in enumerate(pieces):
            pieces[place] = b""
            yield piece

    length = {"content-length": str(sum(map(len, pieces)))}
    return StreamingResponse(sent(), headers=length, media_type="application/json")


async def _read(
    service: Service, request: Request, model: type[BodyT], neutral: Neutral | None = None
) -> tuple[BodyT, int]:
    """Return the body and its size, which is charged to the API key."""
    body, size = await service.read(request, model, neutral)
    service.rate_limits[key_of(request)].charge_bytes(size)
    return body, size


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    placed = {"type": "array", "items": schema_ref(PlacedToken)}
    either = describe_responses({"anyOf": [placed, schema_ref(TokenIds)]}, errors=TgiError, statuses=STATUSES)
    conversation = describe_responses(ConversationTokens, errors=TgiError, statuses=STATUSES)
    detokenized = describe_responses(Detokenized, errors=OpenAIError, statuses=(400, 404, 413, 415, 429, 503))

    @router.post("/tokenize", openapi_extra=json_body(TokenizeBody), responses=either)
    async def tokenize(request: Request) -> Response:
        """`inputs`: a list of {id, text, start, stop}; `prompt`, `messages`: {tokens, count, max_model_len}."""
        if (await read_object(request, service.config)).values.get("messages") is not None:
            conversation, size = await _read(service, request, TokenizedChatBody, CHAT_NEUTRAL)
            builder = service.builder(key_of(request))
            builder.adapter(conversation.model)
            return _answer(await service.text_work(request, size, _conversation_ids, builder, conversation))
        body, size = await _read(service, request, TokenizeBody)
        parameters = validate(GenerateParameters, body.parameters or {}, GENERATE_NEUTRAL)
        builder = service.builder(key_of(request))
        builder.adapter(body.model)
        special = body.add_special_tokens is not False
        if body.add_generation_prompt is not None:
            message = "`add_generation_prompt` goes with `messages` only."
            raise InvalidRequest(message, param="add_generation_prompt")
        if (body.inputs is None) == (body.prompt is None):
            raise InvalidRequest("Give one of `inputs`, `prompt` and `messages`.", param="inputs")
        if body.inputs is not None and body.return_token_strs:
            message = "`return_token_strs` goes with `prompt` and `messages`; the answer to `inputs` has the texts."
            raise InvalidRequest(message, param="return_token_strs")
        if body.inputs is not None:
            options = PromptOptions("inputs", special, parameters.truncate)
            return _answer(await service.text_work(request, size, _spans, builder, body.inputs, options))
        if body.parameters:
            raise InvalidRequest("`parameters` go with `inputs`, not with `prompt`.", param="parameters")
        text = body.prompt or ""
        strings = bool(body.return_token_strs)
        made = service.text_work(request, size, _ids, builder, text, add_special_tokens=special, with_strings=strings)
        return _answer(await made)

    @router.post("/chat_tokenize", openapi_extra=json_body(ChatBody, CHAT_NEUTRAL), responses=conversation)
    async def chat_tokenize(request: Request) -> Response:
        """A chat request as the prompt it becomes: {tokenize_response: [{id, text, start, stop}], templated_text}."""
        body, size = await _read(service, request, ChatBody, CHAT_NEUTRAL)
        builder = service.builder(key_of(request))
        return _answer(await service.text_work(request, size, _conversation, builder, body))

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeBody), responses=detokenized)
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        body, size = await _read(service, request, DetokenizeBody)
        builder = service.builder()
        builder.adapter(body.model)
        ids = builder.check_ids(body.tokens, "tokens")
        decode = service.text.tokenizer.decode
        text = await service.text_work(request, size, decode, ids, skip_special_tokens=bool(body.skip_special_tokens))
        return json_response({"prompt": text})

    @router.get("/tokenizer_info", responses=describe_responses(TokenizerInfo, errors=OpenAIError))
    async def tokenizer_info() -> Response:
        """What clients ask that leave tokenising to the server, such as lm-eval."""
        named, template = service.text.tokenizer.named_tokens, service.text.chat_template
        special = {name: named.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return json_response({**special, "chat_template": None if template is None else template.source})

    return router
