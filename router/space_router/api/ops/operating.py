"""What the server is and does: models, health, metrics, load, info; cancelling requests and restarting workers."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Request
from pydantic import Field
from space_common.version import version
from starlette.responses import Response

from space_router.api.request_builder import choice_id, max_forced_drafts, model_not_found, without_base
from space_router.api.schema import Count, OpenAIError, ResponseModel, TgiError, describe_responses, json_body
from space_router.api.service import Service
from space_router.engine.errors import RestartRefused
from space_router.engine.workers.rolling_restart import FINISH_SECONDS, RestartState
from space_router.engine.workers.worker_connection import WorkerConnection
from space_router.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unavailable
from space_router.http_server.body import Body, short_repr
from space_router.http_server.responses import EventStream, event_json, json_response, key_of

VERSION = version()
StepCostSource = Literal["file", "measured", "learned"]


class Ready(ResponseModel):
    """New work is taken."""

    status: Literal["ready"]


class Alive(ResponseModel):
    """The process answers."""

    status: Literal["alive"]


class Started(ResponseModel):
    """The model has been ready once."""

    status: Literal["started"]


class Version(ResponseModel):
    """Of the package."""

    version: str


class Load(ResponseModel):
    """How busy the engine is now."""

    num_queued: Count
    num_running: Count
    blocks_free: Count
    blocks_held: Count
    blocks_cached: Count
    host_blocks_free: Count
    host_blocks_cached: Count
    states_free: Count
    states_held: Count
    states_cached: Count
    num_workers_up: Count
    draining: bool
    num_waiting_tokens: Count
    block_size: Count


class RestartProgress(ResponseModel):
    """Of the rolling restart that was asked for last. `waits_for`: what it waits for now, in words; `left_out`: workers
    that are not restarted because none is up there, each with the reason."""

    state: Literal["none", "running", "done", "failed", "cancelled"]
    num_done: Count
    num_wanted: Count
    waits_for: str | None
    left_out: list[str]
    error: str | None


class RestartEvent(ResponseModel):
    """A change during a rolling restart that is watched."""

    restart: RestartProgress


class WorkerState(ResponseModel):
    """One worker, as the router knows it."""

    number: Count
    name: str
    state: Literal["up", "leaving", "away"]
    address: str | None
    incarnation: str | None
    num_incarnations: Count
    num_running: Count
    num_cached_blocks: Count
    num_available_blocks: Count
    num_offloaded_blocks: Count
    trouble: str | None


class Workers(ResponseModel):
    """Every worker, and how far a rolling restart is."""

    workers: list[WorkerState]
    restart: RestartProgress


class Cancelled(ResponseModel):
    """A request that was ended by its id."""

    id: str
    object: Literal["request"]
    cancelled: Literal[True]


class SpeculationInfo(ResponseModel):
    """What drafts, and how much. `max_request`: the largest number that a request's `speculation` may be.
    `head_drafts`: most drafts without masks in a step; `head`: what makes them: `recurrent`, the model's own recurrent
    head, `model`, the one of --draft-model, `mtp`, the model's MTP layer, or `eagle`, the head of --draft-head; null:
    nothing. `mask_format`: of the model's own adapter: space, uno or i-dlm; null: it has none."""

    default: str
    max_draft_length: Count | None
    num_masks: Count | None
    max_request: Count | None
    draft_head: bool | None
    head_drafts: Count | None
    head: str | None
    mask_format: str | None


class StepCostsInfo(ResponseModel):
    """Where the worker's estimates of how long steps take came from when it started.

    `file`: kept by an earlier start; `measured`: at this start; `learned`: while serving, because of `reason`.
    """

    source: StepCostSource
    reason: str | None


class Info(ResponseModel):
    """Model, limits and speculation, with TGI's names where TGI has them; what only a worker knows may be null.

    `loras`: name and sha256 of the files of each ordinary LoRA."""

    model_id: str
    model_sha: str | None
    model_dtype: str | None
    model_device_type: str | None
    model_pipeline_tag: Literal["text-generation"]
    max_concurrent_requests: Count
    max_best_of: Count
    max_stop_sequences: Count
    max_input_tokens: Count | None
    max_total_tokens: Count | None
    max_batch_total_tokens: Count | None
    validation_workers: Count
    max_client_batch_size: Count
    router: Literal["spaceserve"]
    version: str
    sha: None
    docker_label: None
    vocab_size: Count | None
    attention: str | None
    instruction_set: str | None
    block_size: Count | None
    num_blocks: Count | None
    state_bytes_per_sequence: Count | None
    speculation: SpeculationInfo
    step_costs: StepCostsInfo | None
    synthetic_acceptance: list[float] | None
    model_fallback: str | None
    adapters: list[str]
    adapter_formats: dict[str, str]
    loras: dict[str, str]
    eos_token_ids: list[int] | None
    turn_end_token_ids: list[int]
    chat_template: bool
    ready: bool


class RestartBody(Body):
    """Which workers to restart, and how long their streams may take to end where they are."""

    workers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="numbers as in GET /workers; without it, all"
    )
    finish_seconds: Annotated[float, Field(ge=0, le=86400)] = Field(
        default=FINISH_SECONDS,
        description="what still runs on a worker after so many seconds goes on elsewhere, with the same text",
    )
    stream: bool = Field(
        default=False,
        description="answer with an event for each change until the restart has ended; a client that goes away before "
        "cancels it",
    )


ANTHROPIC = Field(description="of Anthropic's API: where a request has `anthropic-version`")


class ModelCard(ResponseModel):
    """A model, an adapter that drafts for it, or a LoRA of it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Count | None
    type: Annotated[Literal["model"] | None, ANTHROPIC] = None
    display_name: Annotated[str | None, ANTHROPIC] = None
    created_at: Annotated[str | None, ANTHROPIC] = None


class ModelList(ResponseModel):
    """`GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]
    has_more: Annotated[Literal[False] | None, ANTHROPIC] = None
    first_id: Annotated[str | None, ANTHROPIC] = None
    last_id: Annotated[str | None, ANTHROPIC] = None


def model_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    def cards() -> dict[str, dict[str, Any]]:
        """Return the cards by name: the model, the adapters that draft for it, and its LoRAs as vLLM lists them."""
        facts, name = service.engine.facts, service.text.name
        card = {"object": "model", "created": service.created, "owned_by": "spaceserve"}
        card |= {"max_model_len": None if facts is None else facts.window}
        folders = dict(service.config.adapter)
        adapters = {one: card | {"id": one, "root": folders.get(one, one), "parent": name} for one in service.adapters}
        loras = service.engine.loras.named.values()
        adapters |= {lora.name: card | {"id": lora.name, "root": lora.root, "parent": name} for lora in loras}
        own = {one: card | {"id": one, "root": service.config.model, "parent": None} for one in service.names}
        if service.encoder is not None:
            window = None if facts is None or facts.encoder is None else facts.encoder.window
            names = {"id": service.encoder.name, "root": service.config.embedding_model, "parent": None}
            adapters[service.encoder.name] = card | names | {"max_model_len": window}
        return own | adapters

    def shown(request: Request, card: dict[str, Any]) -> dict[str, Any]:
        """Return a card; for Anthropic's clients, which send a version, with what their API has, too."""
        if "anthropic-version" not in request.headers:
            return card
        created_at = datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z")
        return card | {"type": "model", "display_name": card["id"], "created_at": created_at}

    @router.get("/v1/models", responses=describe_responses(ModelList, errors=OpenAIError))
    async def models(request: Request) -> Response:
        """All models served here."""
        found = [shown(request, card) for card in cards().values()]
        ends: dict[str, Any] = {}
        if "anthropic-version" in request.headers:
            ends = {"has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}
        return json_response({"object": "list", "data": found, **ends})

    @router.get("/v1/models/{name:path}", responses=describe_responses(ModelCard, errors=OpenAIError, statuses=(404,)))
    async def model(request: Request, name: str) -> Response:
        """One model."""
        known = cards()
        unlisted = service.config.unlisted_names
        name = without_base(name, (*service.names, *unlisted))
        if name not in known and (service.config.takes_any_name or name in unlisted):
            return json_response(shown(request, known[service.text.name] | {"id": name}))
        if name not in known:
            raise model_not_found(name, list(known))
        return json_response(shown(request, known[name]))

    return router


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["operating"])

    async def ready() -> Response:
        """200 when new work is taken."""
        if service.draining:
            raise Unavailable("The server is stopping and takes no new work.", reason="draining")
        if not service.engine.ready:
            raise Unavailable("No worker is up yet.", reason="not_ready")
        return json_response({"status": "ready"})

    ready_answers = describe_responses(Ready, errors=OpenAIError, statuses=(503,))
    for path in ("/health", "/readyz", "/ping"):
        router.add_api_route(path, ready, methods=["GET"], response_class=Response, responses=ready_answers)

    @router.get("/livez", responses=describe_responses(Alive, errors=OpenAIError))
    async def livez() -> Response:
        """200 as long as the process answers."""
        return json_response({"status": "alive"})

    @router.get("/startupz", responses=describe_responses(Started, errors=OpenAIError, statuses=(503,)))
    async def startupz() -> Response:
        """200 once the model has been ready."""
        if not service.started:
            raise Unavailable("The server is starting: no worker is up yet.", reason="not_ready")
        return json_response({"status": "started"})

    @router.get("/version", responses=describe_responses(Version, errors=OpenAIError))
    async def version() -> Response:
        """Of this server."""
        return json_response({"version": VERSION})

    @router.get("/metrics", responses=describe_responses({"type": "string"}, errors=OpenAIError, media="text/plain"))
    async def metrics(request: Request) -> Response:
        """Every series, in Prometheus' text format. Where there are API keys, those that have the keys' names are
        only for an operator's key."""
        with_keys = not service.config.api_keys or service.keys.is_operator(key_of(request))
        return Response(
            service.metrics.render(with_keys=with_keys), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @router.get("/load", responses=describe_responses(Load, errors=OpenAIError))
    async def load() -> Response:
        """How busy the engine is now."""
        figures = service.engine.load()
        return json_response({name: getattr(figures, name) for name in figures.__dataclass_fields__})

    cancelled = describe_responses(Cancelled, errors=OpenAIError, statuses=(404,))

    @router.delete("/v1/requests/{request_id}", responses=cancelled)
    async def cancel(request: Request, request_id: str) -> Response:
        """End a request by the id it was given (`request_id`, header `x-request-id`), with all its choices.

        With API keys: of the same key only.
        """
        choices = (choice_id(request_id, index) for index in range(service.config.max_choices))
        ended = [service.engine.cancel(name, key_of(request)) for name in (request_id, *choices)]
        if not any(ended):
            raise NotFound(f"There is no running request {short_repr(request_id)}.", code="request_not_found")
        return json_response({"id": request_id, "object": "request", "cancelled": True})

    @router.get("/info", responses=describe_responses(Info, errors=TgiError))
    async def info() -> Response:
        """Model, limits and speculation, with TGI's names where TGI has them."""
        return json_response(describe(service))

    def progress() -> dict[str, Any]:
        restart = service.restart
        counts = {"state": restart.state.value, "num_done": restart.num_done, "num_wanted": restart.num_wanted}
        words = {"waits_for": restart.waits_for or None, "left_out": restart.left_out, "error": restart.error or None}
        return counts | words

    def state() -> Response:
        workers = [_describe_worker(connection) for connection in service.engine.connections]
        return json_response({"workers": workers, "restart": progress()})

    @router.get("/workers", responses=describe_responses(Workers, errors=OpenAIError))
    async def workers() -> Response:
        """Every worker, and how far a rolling restart is."""
        return state()

    async def events() -> AsyncGenerator[bytes]:
        restart = service.restart
        async with aclosing(restart.progress()) as changes:
            async for _ in changes:
                yield b"data: %b\n\n" % event_json({"restart": progress()})
        yield b"data: [DONE]\n\n"

    @asynccontextmanager
    async def cancelled_with_its_client() -> AsyncIterator[None]:
        try:
            yield
        finally:
            if service.restart.state is RestartState.RUNNING:
                service.restart.cancel()

    def check_operator(request: Request) -> None:
        if not service.keys.is_operator(key_of(request)):
            raise Forbidden(
                "This needs an operator's key: `KEY name=ops operator=yes` in --api-key-file. On the router's own "
                "machine, `kill -USR1` does it without.",
                code="not_an_operator",
            )

    statuses = (400, 403, 408, 409, 413, 415, 499, 503)
    restarted = describe_responses(Workers, errors=OpenAIError, statuses=statuses, event=RestartEvent, done=True)

    @router.post("/workers/restart", responses=restarted, openapi_extra=json_body(RestartBody))
    async def restart(request: Request) -> Response:
        """Restart workers one after the other without losing a stream; GET /workers says how far it is.

        Needs an API key with `operator=yes`. The same as signal SIGUSR1 to the router. A worker that never was up, or
        is refused, is left out.
        """
        check_operator(request)
        body, _ = await service.read(request, RestartBody)
        if service.draining:
            raise Unavailable("The server is stopping.", reason="draining")
        try:
            service.restart.begin(finish_seconds=body.finish_seconds, numbers=body.workers)
        except RestartRefused as refused:
            if refused.is_busy:
                raise Conflict(str(refused), code="restart_under_way") from refused
            raise InvalidRequest(str(refused), param="workers") from refused
        if body.stream:
            return EventStream(events(), cancelled_with_its_client(), {}, "")
        return state()

    @router.delete("/workers/restart", responses=describe_responses(Workers, errors=OpenAIError, statuses=(403,)))
    async def cancel_restart(request: Request) -> Response:
        """End a rolling restart: a worker that was not asked to end yet takes requests again, and no other is asked.

        Needs an API key with `operator=yes`. Without a restart that is running it changes nothing.
        """
        check_operator(request)
        service.restart.cancel()
        await service.restart.wait()
        return state()

    return router


def describe(service: Service) -> dict[str, Any]:
    """Return the body of `/info`. Values that a worker reports are null until one is connected."""
    config, facts = service.config, service.engine.facts
    window = None if facts is None else facts.window
    num_workers = len(service.engine.connections)
    step_costs = None
    if facts is not None and facts.step_cost_source in get_args(StepCostSource):  # some workers do not report it
        step_costs = {"source": facts.step_cost_source, "reason": facts.step_cost_reason or None}
    return {
        "model_id": service.text.name,
        "model_sha": None if facts is None else facts.model_hash,
        "model_dtype": None if facts is None else facts.dtype,
        "model_device_type": None if facts is None else facts.device,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": config.max_queue + (0 if facts is None else facts.max_sequences * num_workers),
        "max_best_of": config.max_choices,
        "max_stop_sequences": config.max_stop_strings,
        "max_input_tokens": None if window is None else min(window - 1, config.max_prompt_tokens or window),
        "max_total_tokens": window,
        "max_batch_total_tokens": None if facts is None else facts.num_slots * num_workers,
        "validation_workers": 1,  # the event loop; long prompts are validated in threads
        "max_client_batch_size": config.max_choices,
        "router": "spaceserve",
        "version": VERSION,
        "sha": None,  # not known to the package
        "docker_label": None,
        "vocab_size": None if facts is None else facts.vocab_size,
        "attention": None if facts is None else facts.attention,
        "instruction_set": None if facts is None else facts.instruction_set or None,
        "block_size": None if facts is None else facts.block_size,
        "num_blocks": None if facts is None else facts.num_blocks,
        "state_bytes_per_sequence": None if facts is None else facts.state_bytes_per_sequence,  # beside pages
        "speculation": {
            "default": config.speculation,
            "max_draft_length": None if facts is None else facts.max_draft_length,
            "num_masks": None if facts is None else facts.num_masks,
            "max_request": None if facts is None else max_forced_drafts(config, facts),
            "draft_head": None if facts is None else facts.has_draft_head,
            "head_drafts": None if facts is None else facts.num_head_drafts,
            "head": None if facts is None else facts.head_kind or None,
            "mask_format": None if facts is None else facts.mask_format or None,
        },
        "step_costs": step_costs,
        "synthetic_acceptance": (list(facts.synthetic_acceptance) or None) if facts is not None else None,
        "model_fallback": config.model_fallback,
        "adapters": list(service.adapters),
        "adapter_formats": {} if facts is None else dict(zip(facts.adapters, facts.adapter_formats, strict=False)),
        "loras": {lora.name: lora.digest for lora in service.engine.loras.named.values()},  # hashes of their files
        "eos_token_ids": None if facts is None else list(facts.eos_ids),  # end any text
        "turn_end_token_ids": list(service.text.turn_end_ids),  # also end an assistant turn
        "chat_template": service.text.chat_template is not None,
        "ready": service.ready,
    }


def _describe_worker(connection: WorkerConnection) -> dict[str, Any]:
    scheduler = connection.scheduler
    return {
        "number": connection.number,
        "name": connection.source.name,
        "state": "away" if scheduler is None else "leaving" if scheduler.closing else "up",
        "address": connection.address,
        "incarnation": None if scheduler is None else scheduler.facts.incarnation,
        "num_incarnations": connection.num_incarnations,
        "num_running": 0 if scheduler is None else scheduler.num_running,
        "num_cached_blocks": 0 if scheduler is None else scheduler.pool.num_cached,
        "num_available_blocks": 0 if scheduler is None else scheduler.pool.num_available,
        "num_offloaded_blocks": 0 if scheduler is None else scheduler.offload.num_cached,
        "trouble": connection.trouble or None,
    }
