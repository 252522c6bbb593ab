"""Loading and unloading ordinary LoRA adapters while serving, with vLLM's paths and fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from space_router.api.generation import translate
from space_router.api.schema import OpenAIError, describe_responses, json_body
from space_router.api.service import Service
from space_router.engine.errors import EngineError, LoraRefused
from space_router.errors import ApiError, Forbidden, InvalidRequest, NotFound, Unavailable
from space_router.http_server.body import Body, short_repr
from space_router.http_server.responses import key_of

Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadLoraBody(Body):
    """A LoRA to load."""

    lora_name: Name = Field(description="as requests name it in `model`")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="folder that peft saved, below `--lora-folder`; absolute, or from there"
    )
    load_inplace: bool = Field(
        default=False, description="load it in the place of one with this name; requests before end on the former"
    )


class UnloadLoraBody(Body):
    """A LoRA to unload."""

    lora_name: Name
    lora_int_id: int | None = Field(default=None, description="vLLM's number; it has no effect")


STATUSES = (400, 403, 404, 408, 413, 415, 499, 503)


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["operating"])
    answers = describe_responses({"type": "string"}, errors=OpenAIError, statuses=STATUSES, media="text/plain")

    def check(request: Request) -> Path:
        """Return the folder of LoRAs. Raises Forbidden and Unavailable."""
        if not service.keys.is_operator(key_of(request)):
            raise Forbidden(
                "This needs an operator's key: `KEY name=ops operator=yes` in --api-key-file.", code="not_an_operator"
            )
        if service.config.lora_folder is None:
            raise Forbidden(
                "LoRAs are loaded here at start only: see --lora, and --lora-folder.", code="no_lora_folder"
            )
        if service.draining:
            raise Unavailable("The server is stopping.", reason="draining")
        return Path(service.config.lora_folder).expanduser().resolve()

    @router.post("/v1/load_lora_adapter", responses=answers, openapi_extra=json_body(LoadLoraBody))
    async def load(request: Request) -> Response:
        """Load a LoRA on every worker. Needs an API key with `operator=yes`, and `--lora-folder`."""
        top = check(request)
        body, _ = await service.read(request, LoadLoraBody)
        name, folder = body.lora_name, (top / body.lora_path).resolve()
        if not folder.is_relative_to(top):
            raise InvalidRequest(
                f"`lora_path` is {short_repr(body.lora_path)}, which is not below --lora-folder.", param="lora_path"
            )
        if name in service.names or name in service.adapters:
            what = "the model" if name in service.names else "an adapter"
            raise InvalidRequest(f"`lora_name` is {short_repr(name)}, and {what} is called so.", param="lora_name")
        if name in service.engine.loras.named and not body.load_inplace:
            raise InvalidRequest(
                f"The lora adapter {short_repr(name)} has already been loaded. Send `load_inplace`: true to load it "
                "anew.",
                param="lora_name",
            )
        try:
            await service.engine.load_lora(name, str(folder))
        except EngineError as error:
            raise refusal(error) from error
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

    @router.post("/v1/unload_lora_adapter", responses=answers, openapi_extra=json_body(UnloadLoraBody))
    async def unload(request: Request) -> Response:
        """Unload a LoRA: no new request can name it; those that use it end with it. Needs the same as loading."""
        check(request)
        body, _ = await service.read(request, UnloadLoraBody)
        if not service.engine.unload_lora(body.lora_name):
            raise NotFound(f"There is no LoRA {short_repr(body.lora_name)}.", param="lora_name", code="lora_not_found")
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")

    return router


def refusal(error: EngineError) -> ApiError:
    """Convert an error of loading."""
    return InvalidRequest(str(error), param="lora_path") if isinstance(error, LoraRefused) else translate(error)
