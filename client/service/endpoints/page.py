"""``GET /``: the page, which needs nothing from elsewhere."""

from importlib.resources import files

from fastapi import APIRouter, Response

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}


def page_routes() -> APIRouter:
    """Return the paths of the page's files."""
    router = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _FILES.items():
        content = files("client.service").joinpath("page", name).read_bytes()
        _add_file(router, path, content, media_type)
    return router


def _add_file(router: APIRouter, path: str, content: bytes, media_type: str) -> None:
    async def file() -> Response:
        return Response(content, headers={"content-type": media_type})

    router.add_api_route(path, file, methods=["GET"])
