"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from space_router.api.anthropic.answers import AnthropicError, AnthropicMessage, MessageEvent, TokenCount
from space_router.api.anthropic.conversation import conversation_prompt, tools_of, with_reasoning
from space_router.api.anthropic.fields import (
    MESSAGES_NEUTRAL,
    ConversationFields,
    CountTokensBody,
    MessagesBody,
)
from space_router.api.anthropic.message_answer import MessageAnswer
from space_router.api.openai.chat import ToolUse
from space_router.api.openai.fields import SamplingFields
from space_router.api.request_builder import GenerationPlan, Parameters, RequestBuilder
from space_router.api.schema import ANTHROPIC_STATUSES, describe_responses, json_body
from space_router.api.service import Service
from space_router.errors import InvalidRequest
from space_router.http_server.body import BodyT, ignoring_unknown_fields
from space_router.http_server.responses import json_response, key_of

_NAMES = {"`response_format`": "`output_config.format`", "`stop`": "`stop_sequences`"}
"""Names of chat completion fields in this API."""


def plan(builder: RequestBuilder, body: MessagesBody, tools: ToolUse) -> GenerationPlan:
    """Build the plan. An answer that the window cuts short is no error. Raises InvalidRequest."""
    prompt, thinking = conversation_prompt(builder, body, tools)
    same = Parameters.__dataclass_fields__.keys() & SamplingFields.model_fields.keys()
    wanted = Parameters(
        **{name: getattr(body, name) for name in same - {"stop"}},
        default_max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        adapter=builder.adapter(body.model),
        end_ids=builder.text.turn_end_ids,
        grammar=tools.grammar,
        shown_ids=tools.markers,
    )
    return builder.plan([prompt], with_reasoning(builder, wanted, thinking, body.thinking), prefix="msg_")


def count(builder: RequestBuilder, body: ConversationFields) -> int:
    """Return the number of the prompt's tokens. Raises InvalidRequest."""
    builder.adapter(body.model)
    prompt, _ = conversation_prompt(builder, body, tools_of(builder, body))
    return len(prompt.ids)


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["Anthropic"])

    async def read(request: Request, model: type[BodyT]) -> tuple[BodyT, int]:
        """Return the body and its size. Fields of a beta that are not known here get a warning."""
        is_beta = "anthropic-beta" in request.headers or "beta" in request.query_params
        with ignoring_unknown_fields(is_beta and not service.config.is_strict):
            return await service.read(request, model, MESSAGES_NEUTRAL)

    answers = describe_responses(
        AnthropicMessage, errors=AnthropicError, event=MessageEvent, statuses=ANTHROPIC_STATUSES
    )
    counted = describe_responses(TokenCount, errors=AnthropicError, statuses=ANTHROPIC_STATUSES)

    @router.post("/v1/messages", openapi_extra=json_body(MessagesBody, MESSAGES_NEUTRAL), responses=answers)
    async def messages(request: Request) -> Response:
        """Answer a conversation, in Anthropic's API."""
        body, size = await read(request, MessagesBody)
        builder = service.builder(key_of(request))
        try:
            tools = await service.text_work(request, size, tools_of, builder, body)
            await service.checked(tools.grammar, "tools" if tools.shown else "output_config")
            made = await service.text_work(request, size, plan, builder, body, tools)
        except InvalidRequest as error:
            for name, own in _NAMES.items():
                error.message = error.message.replace(name, own)
            raise
        shown = "all" if body.thinking is None else body.thinking.shown
        reply = MessageAnswer(made, tools, service.name_of(made, body.model), body.max_tokens, shown)
        return await service.respond(request, reply, stream=bool(body.stream))

    @router.post(
        "/v1/messages/count_tokens", openapi_extra=json_body(CountTokensBody, MESSAGES_NEUTRAL), responses=counted
    )
    async def count_tokens(request: Request) -> Response:
        """Count the tokens that the messages, system prompt and tools have as a prompt."""
        body, size = await read(request, CountTokensBody)
        service.rate_limits[key_of(request)].charge_bytes(size)
        builder = service.builder(key_of(request))
        return json_response({"input_tokens": await service.text_work(request, size, count, builder, body)})

    return router
