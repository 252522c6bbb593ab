"""`GET /` and the files of the web page."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from space_router.api.schema import answers
from space_router.api.tgi.answers import TgiError
from space_router.web_ui.files import PAGE_FILES, PageFile


def routes() -> APIRouter:
    """Return one route for each file. Only `/`, which is also a TGI route, is in the OpenAPI document."""
    router = APIRouter()
    described = answers({"type": "string"}, errors=TgiError, media="text/html")
    described[304] = {"description": "The client has it: `If-None-Match` names it."}

    def add(file: PageFile) -> None:
        async def get(request: Request) -> Response:
            return file.answer(request.headers.get("if-none-match"))

        shown = file.path == "/"
        router.add_api_route(
            file.path,
            get,
            methods=["GET"],
            name="the page",
            description="A page to try the model in.",
            response_class=Response,
            responses=described,
            include_in_schema=shown,
        )

    for file in PAGE_FILES.values():
        add(file)
    return router
