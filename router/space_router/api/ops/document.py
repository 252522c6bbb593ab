"""`/openapi.json`: the request and response schemas of every route."""

from typing import Any

from fastapi import FastAPI

from space_router.http_server.paths import is_open

_VALIDATION = ("HTTPValidationError", "ValidationError")  # FastAPI's own errors, which no route returns


class DocumentedApp(FastAPI):
    """A FastAPI application with an OpenAPI document that contains only what the routes declare."""

    keyed = False  # requests need an API key

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            whole = super().openapi()
            components = whole.setdefault("components", {})
            schemas = components["schemas"] = {
                name: schema for name, schema in components.get("schemas", {}).items() if name not in _VALIDATION
            }
            if self.keyed:
                components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            for path, operations in whole["paths"].items():
                for method, operation in operations.items():
                    _drop_guesses(operation["responses"])
                    if is_open(path, method.upper()):
                        operation["responses"].pop("401", None)
                    elif self.keyed:
                        operation["security"] = [{"bearer": []}]
            _gather(whole, schemas)
            self.openapi_schema = whole
        return self.openapi_schema


def _drop_guesses(responses: dict[str, Any]) -> None:
    """Remove FastAPI's default responses: a generic JSON body, and a 422 for routes with parameters."""
    json = responses["200"].get("content", {}).get("application/json")
    if json is not None and not json.get("schema"):
        del responses["200"]["content"]["application/json"]
    wrong = responses.get("422", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if wrong.get("$ref", "").endswith(_VALIDATION[0]):
        del responses["422"]


def _gather(node: Any, schemas: dict[str, Any]) -> None:
    """Move every `$defs` into `schemas`. Raises ValueError if two models with the same name differ."""
    if isinstance(node, list):
        for item in node:
            _gather(item, schemas)
    elif isinstance(node, dict):
        for name, schema in node.pop("$defs", {}).items():
            if schemas.setdefault(name, schema) != schema:
                raise ValueError(f"two models of the OpenAPI document are called {name}")
        for value in list(node.values()):
            _gather(value, schemas)
