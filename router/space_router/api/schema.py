"""What `/docs` says about bodies that are read by hand."""

from typing import Any

from space_router.api.body import Body


def json_body(model: type[Body]) -> dict[str, Any]:
    """OpenAPI's description of a JSON body."""
    schema = model.model_json_schema(ref_template=f"#/components/schemas/{model.__name__}-{{model}}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inline(schema)}}}}


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """Definitions written out where they are used: none of them refers to itself."""
    definitions = schema.pop("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return walk(definitions[node["$ref"].rsplit("-", 1)[-1]])
            return {key: walk(value) for key, value in node.items()}
        return [walk(item) for item in node] if isinstance(node, list) else node

    written: dict[str, Any] = walk(schema)
    return written
