"""`GET /v1/models`: what is served."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from space_router.api.answers import answer
from space_router.api.body import shown
from space_router.api.service import Service
from space_router.errors import NotFound


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    def card() -> dict[str, Any]:
        facts = service.engine.facts
        return {
            "id": service.text.name,
            "object": "model",
            "created": service.created,
            "owned_by": "spaceserve",
            "root": service.config.model,
            "max_model_len": None if facts is None else facts.window,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """All models served here."""
        return answer({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One model."""
        if name != service.text.name:
            raise NotFound(
                f"The model {shown(name)} is not served here; `{service.text.name}` is.",
                param="model",
                code="model_not_found",
            )
        return answer(card())

    return router
