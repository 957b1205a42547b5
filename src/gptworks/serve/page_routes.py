"""The page at `/`, which looks into the models: its files, and the cards of its models.

Every file has a route of its own and is read once, at the start: nothing of a request becomes a path.
"""

import asyncio
import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gptworks.serve import page_html
from gptworks.serve.api_error import ApiError
from gptworks.serve.model_card import ModelCards
from gptworks.serve.responses import json_response
from gptworks.serve.service import Service

PREFIX = "/page/"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "vary": "accept-language",
    "cache-control": "no-cache",  # asked again each time, and answered with 304
}


def files() -> dict[str, bytes]:
    """Name -> contents of all that the page is made of."""
    folder = resources.files("gptworks.serve").joinpath("page")
    names = sorted(each.name for each in folder.iterdir() if "." + each.name.rpartition(".")[2] in _KINDS)
    return {name: folder.joinpath(name).read_bytes() for name in names}


def routes(service: Service) -> list[Route]:
    cards = ModelCards()

    async def card(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in service.models:
            raise ApiError(404, f"There is no model {name[:100]!r}.", param="model", code="model_not_found")
        facts = await asyncio.to_thread(cards.card, service.models[name])
        _, port = request.scope.get("server") or ("", None)  # its own, whatever stands between it and the browser
        return json_response({**facts, "port": port}, headers={"cache-control": "no-store"})

    contents = files()
    return [*(_file_route(name, text, contents) for name, text in contents.items()), Route("/card/{name:path}", card)]


def open_paths() -> set[str]:
    """What is answered without a key: the page, which then asks for it. No model is in it."""
    return {_path_of(name) for name in files()}


def _path_of(name: str) -> str:
    return "/" if name == "page.html" else PREFIX + name


def _file_route(name: str, text: bytes, files: dict[str, bytes]) -> Route:
    kind = _KINDS["." + name.rpartition(".")[2]] + "; charset=utf-8"
    pages = {each: page_html.written(files, each) for each in page_html.LANGUAGES} if name == "page.html" else {}
    versions = {language: _version(page) for language, page in pages.items()} or {"": _version(text)}

    async def file(request: Request) -> Response:
        language = page_html.language_for(request.headers.get("accept-language", "")) if pages else ""
        body, headers = versions[language]
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    return Route(_path_of(name), file)


def _version(text: bytes) -> tuple[bytes, dict[str, str]]:
    tag = f'"{hashlib.sha256(text).hexdigest()[:32]}"'
    return text, {**_HEADERS, "content-security-policy": page_html.policy(text), "etag": tag}
