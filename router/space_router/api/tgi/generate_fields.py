"""Fields of TGI's requests; limits that depend on the model or flags are checked in `request_builder`."""

from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue

from space_router.api.grammar_fields import TgiGrammar
from space_router.api.schema import neutral_fields
from space_router.http_server.body import Body

# Known fields that this server does not support, with the values that mean "off".
GENERATE_NEUTRAL: dict[str, tuple[Any, ...]] = {"watermark": (False,)}


class GenerateParameters(Body):
    """`parameters`, as TGI names them; `speculation` is ours."""

    best_of: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    do_sample: bool | None = None
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    return_full_text: bool | None = None
    stop: Any = Field(default=None, description="a list of strings")
    truncate: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=20)] | None = None
    speculation: Literal["auto", "off"] | Annotated[int, Field(ge=0)] | None = None
    adapter_id: Annotated[str, Field(max_length=512)] | None = None
    grammar: TgiGrammar | None = None

    @property
    def detailed(self) -> bool:
        """Whether to return details. Asking for any part of them by name returns all, as in TGI."""
        return bool(self.details or self.decoder_input_details or self.top_n_tokens)


class _Described:
    """The OpenAPI schema of a field that is validated by hand."""

    def __get_pydantic_json_schema__(self, _: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(GenerateParameters.__pydantic_core_schema__)
        handler.resolve_ref_schema(schema)["properties"] |= neutral_fields(GENERATE_NEUTRAL)
        return schema


Settings = Annotated[dict[str, Any], _Described()]
"""Unvalidated `parameters`; validated later as GenerateParameters, so that errors name a field without its path."""


class GenerateBody(Body):
    """`POST /generate` and `POST /generate_stream`."""

    inputs: Annotated[str, Field(min_length=1)]
    parameters: Settings | None = None


class CompatBody(GenerateBody):
    """`POST /`."""

    stream: bool | None = None
