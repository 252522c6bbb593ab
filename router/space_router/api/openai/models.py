"""`GET /v1/models`: the served model and its adapters."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from space_router.api.openai.answers import ModelCard, ModelList
from space_router.api.request_builder import model_not_found
from space_router.api.schema import OpenAIError, describe_responses
from space_router.api.service import Service
from space_router.http_server.responses import json_response


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    def cards() -> dict[str, dict[str, Any]]:
        """Return the cards by name: the model, and the adapters that draft for it, as vLLM lists LoRA adapters."""
        facts = service.engine.facts
        base: dict[str, Any] = {
            "id": service.text.name,
            "object": "model",
            "created": service.created,
            "owned_by": "spaceserve",
            "root": service.config.model,
            "parent": None,
            "max_model_len": None if facts is None else facts.window,
        }
        folders = dict(service.config.adapter)
        adapters = [
            base | {"id": name, "root": folders.get(name, name), "parent": service.text.name}
            for name in service.adapters
        ]
        return {card["id"]: card for card in (base, *adapters)}

    @router.get("/v1/models", responses=describe_responses(ModelList, errors=OpenAIError))
    async def models() -> Response:
        """All models served here."""
        return json_response({"object": "list", "data": list(cards().values())})

    @router.get("/v1/models/{name:path}", responses=describe_responses(ModelCard, errors=OpenAIError, statuses=(404,)))
    async def model(name: str) -> Response:
        """One model."""
        known = cards()
        name = name.removeprefix(f"{service.text.name}:")
        if name not in known:
            raise model_not_found(name, list(known))
        return json_response(known[name])

    return router
