"""The endpoints: OpenAI's /v1, and a few of our own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from gptworks.serve import chat, completions, page_routes
from gptworks.serve.api_error import ApiError
from gptworks.serve.guard import Guard
from gptworks.serve.responses import ClientGone, json_response, respond
from gptworks.serve.rows import tokens_of
from gptworks.serve.schema import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parsed
from gptworks.serve.served_model import ServedModel
from gptworks.serve.service import Call, Service

_LONG = 2000  # bytes of a body whose texts are encoded beside the loop that answers others
# So many times the largest body are read and thrown away: a connection that is closed on a client that still sends
# loses the answer. Who asks before sending (Expect: 100-continue) is told without.
_MOST_READ = 16
T = TypeVar("T")


def application(
    service: Service,
    *,
    keys: Sequence[bytes] = (),
    is_local: bool = True,
    origins: Sequence[str] = (),
    has_page: bool = True,
) -> ASGIApp:
    endpoints = _Endpoints(service)
    routes = [
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
        *(page_routes.routes(service) if has_page else []),
    ]

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.end)

    # Without the layers of an application: the guard answers whatever is raised.
    router = Router(routes, lifespan=lifespan, redirect_slashes=False)
    guard = Guard(router, keys=keys, is_local=is_local, metrics=service.metrics)
    guard.known_paths = {route.path for route in routes}
    guard.open_paths |= page_routes.open_paths() if has_page else set()
    if origins:  # outside of the guard: browsers ask first, and send no key with that
        return CORSMiddleware(
            guard,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return guard


class _Endpoints:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [served.card() for served in self.service.models.values()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.service.models:
            raise ApiError(404, f"There is no model {name[:100]!r}.", param="model", code="model_not_found")
        return json_response(self.service.models[name].card())

    async def completions(self, request: Request) -> Any:
        body, size = await self._body(request, CompletionRequest)
        call = Call(self.service.find(body.model))
        prompts = await _beside(size, completions.prompts_of, call.served, body)
        return await respond(self.service, request, completions.answer_to(call, body, prompts))

    async def chat(self, request: Request) -> Any:
        body, size = await self._body(request, ChatRequest)
        call = Call(self.service.find(body.model))
        prompt = await _beside(size, chat.prompt_of, call.served, body.messages)
        return await respond(self.service, request, chat.answer_to(call, body, prompt))

    async def tokenize(self, request: Request) -> Response:
        body, size = await self._body(request, TokenizeRequest)
        served = self.service.find(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: needs a text here, or messages, and not both.", param="prompt")
        tokens = await _beside(size, _tokens, served, body)
        texts = [served.token_texts.text_of(token) for token in tokens]
        counts = {"tokens": tokens, "token_strs": texts, "count": len(tokens), "max_model_len": served.context}
        return json_response(counts)

    async def detokenize(self, request: Request) -> Response:
        body, _ = await self._body(request, DetokenizeRequest)
        served = self.service.find(body.model)
        tokens = tokens_of(served, body.tokens, 1)
        return json_response({"prompt": served.tokenizer.decode(tokens)})

    async def health(self, _: Request) -> Response:
        if self.service.is_draining:
            raise ApiError(503, "The server is being stopped.", retry_after=10)
        return json_response({"status": "ok", "models": list(self.service.models)})

    async def metrics(self, _: Request) -> Response:
        return Response(self.service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _body(self, request: Request, kind: type[Body]) -> tuple[Body, int]:
        limits = self.service.limits
        content_type = request.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            # A page of elsewhere can make a browser send other types without asking.
            needed = "needs application/json (curl: -H 'Content-Type: application/json')"
            raise ApiError(415, f"Content-Type: got {content_type[:100]!r}; {needed}.")
        too_large = ApiError(413, f"The body is larger than {limits.body_bytes:,} bytes.", code="request_too_large")
        size = request.headers.get("content-length", "0")
        most_read = limits.body_bytes if "expect" in request.headers else _MOST_READ * limits.body_bytes
        if size.isdigit() and int(size) > most_read:
            raise too_large
        text, num_read = bytearray(), 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for piece in request.stream():
                    num_read += len(piece)
                    if num_read <= limits.body_bytes:
                        text += piece
                    elif num_read > most_read:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {limits.body_seconds:g} seconds.") from None
        except ClientDisconnect:
            raise ClientGone from None
        if num_read > limits.body_bytes:
            raise too_large
        return parsed(bytes(text), kind), num_read


async def _beside(size: int, function: Callable[..., T], *args: Any) -> T:
    """In another thread where it would keep others waiting."""
    return await asyncio.to_thread(function, *args) if size > _LONG else function(*args)


def _tokens(served: ServedModel, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return chat.prompt_of(served, body.messages)
    return tokens_of(served, body.prompt or "", 1)
