"""Operator routes: health, readiness, version, metrics, load, info, and cancelling requests."""

from typing import Any, get_args

from fastapi import APIRouter, Request
from space_common.version import version
from starlette.responses import Response

from space_router.api.openai.answers import OpenAIError
from space_router.api.ops.operating_answers import Alive, Cancelled, Info, Load, Ready, Started, StepCostSource, Version
from space_router.api.request_builder import choice_id
from space_router.api.schema import answers
from space_router.api.service import Service
from space_router.api.tgi.answers import TgiError
from space_router.engine.model_facts import WorkerModelFacts
from space_router.errors import NotFound, Unavailable
from space_router.http_server.answers import answer
from space_router.http_server.body import shown
from space_router.http_server.paths import key_of

VERSION = version()


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["operating"])

    async def ready() -> Response:
        """200 when new work is taken."""
        if service.draining:
            raise Unavailable("The server is stopping and takes no new work.", reason="draining")
        if not service.engine.ready:
            raise Unavailable("No worker is up yet.", reason="not_ready")
        return answer({"status": "ready"})

    ready_answers = answers(Ready, errors=OpenAIError, statuses=(503,))
    for path in ("/health", "/readyz", "/ping"):
        router.add_api_route(path, ready, methods=["GET"], response_class=Response, responses=ready_answers)

    @router.get("/livez", responses=answers(Alive, errors=OpenAIError))
    async def livez() -> Response:
        """200 as long as the process answers."""
        return answer({"status": "alive"})

    @router.get("/startupz", responses=answers(Started, errors=OpenAIError, statuses=(503,)))
    async def startupz() -> Response:
        """200 once the model has been ready."""
        if not service.started:
            raise Unavailable("The server is starting: no worker is up yet.", reason="not_ready")
        return answer({"status": "started"})

    @router.get("/version", responses=answers(Version, errors=OpenAIError))
    async def version() -> Response:
        """Of this server."""
        return answer({"version": VERSION})

    @router.get("/metrics", responses=answers({"type": "string"}, errors=OpenAIError, media="text/plain"))
    async def metrics() -> Response:
        """Every series, in Prometheus' text format."""
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/load", responses=answers(Load, errors=OpenAIError))
    async def load() -> Response:
        """How busy the engine is now."""
        figures = service.engine.load()
        return answer({name: getattr(figures, name) for name in figures.__dataclass_fields__})

    @router.delete("/v1/requests/{request_id}", responses=answers(Cancelled, errors=OpenAIError, statuses=(404,)))
    async def cancel(request: Request, request_id: str) -> Response:
        """End a request by the id it was given (`request_id`, header `x-request-id`), with all its choices.

        With API keys: of the same key only.
        """
        choices = (choice_id(request_id, index) for index in range(service.config.max_choices))
        ended = [service.engine.cancel(name, key_of(request)) for name in (request_id, *choices)]
        if not any(ended):
            raise NotFound(f"There is no running request {shown(request_id)}.", code="request_not_found")
        return answer({"id": request_id, "object": "request", "cancelled": True})

    @router.get("/info", responses=answers(Info, errors=TgiError))
    async def info() -> Response:
        """Model, limits and speculation, with TGI's names where TGI has them."""
        return answer(describe(service))

    return router


def describe(service: Service) -> dict[str, Any]:
    """Return the body of `/info`. Values that a worker reports are null until one is connected."""
    config, facts = service.config, service.engine.facts
    window = None if facts is None else facts.window
    num_workers = len(service.engine.connections)
    return {
        "model_id": service.text.name,
        "model_sha": None if facts is None else facts.model_hash,
        "model_dtype": None if facts is None else facts.dtype,
        "model_device_type": None if facts is None else facts.device,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": config.max_queue + (0 if facts is None else facts.max_sequences * num_workers),
        "max_best_of": config.max_choices,
        "max_stop_sequences": config.max_stop_strings,
        "max_input_tokens": None if window is None else window - 1,
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
        "block_size": None if facts is None else facts.block_size,
        "num_blocks": None if facts is None else facts.num_blocks,
        "speculation": {
            "default": config.speculation,
            "max_draft_length": None if facts is None else facts.max_draft_length,
            "num_masks": None if facts is None else facts.num_masks,
            "draft_head": None if facts is None else facts.has_draft_head,
        },
        "step_costs": None if facts is None else _step_costs(facts),
        "synthetic_acceptance": (list(facts.synthetic_acceptance) or None) if facts is not None else None,
        "model_fallback": config.model_fallback,
        "adapters": list(service.adapters),
        "eos_token_ids": None if facts is None else list(facts.eos_ids),  # end any text
        "turn_end_token_ids": list(service.text.turn_end_ids),  # also end an assistant turn
        "chat_template": service.text.chat_template is not None,
        "ready": service.ready,
    }


def _step_costs(facts: WorkerModelFacts) -> dict[str, str | None] | None:
    """Return the origin of a worker's step cost estimates, or None if the worker does not report it."""
    if facts.step_cost_source not in get_args(StepCostSource):
        return None
    return {"source": facts.step_cost_source, "reason": facts.step_cost_reason or None}
