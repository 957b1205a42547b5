"""What every request passes: whose it is, where it was sent, and that whatever goes wrong is answered in JSON."""

import hmac
import ipaddress
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gptworks.errors import UsageError
from gptworks.serve.api_error import ApiError
from gptworks.serve.metrics import Metrics
from gptworks.serve.responses import ClientGone, error_response

OPEN_PATHS = ("/health",)  # that a load balancer asks without a key


class Guard:
    """`keys`: none means that everybody may. `is_local`: the server listens on this machine only, and a page of
    somewhere else must not reach it through a name that its owner lets point here."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[bytes], is_local: bool, metrics: Metrics) -> None:
        self.app, self.keys, self.is_local, self.metrics = app, list(keys), is_local, metrics
        self.known_paths: set[str] = set()
        self.open_paths = set(OPEN_PATHS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope["app"] = self  # then the router raises where nothing is found
        try:
            self._require_host(scope)
            self._require_key(scope)
            await self.app(scope, receive, counting)
        except ClientGone:
            status = status or 499  # as other servers count those who went away
        except ApiError as error:
            await error_response(error)(scope, receive, counting)
        except HTTPException as error:
            await error_response(self._not_served(scope, error.status_code))(scope, receive, counting)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            if status:
                raise  # half an answer is out: the connection is closed
            await error_response(ApiError(500, "The server failed; its log says why."))(scope, receive, counting)
        path = scope["path"] if scope["path"] in self.known_paths else "other"
        self.metrics.requests.add(1, path, str(status))

    def _not_served(self, scope: Scope, status: int) -> ApiError:
        path, method = scope["path"][:100], scope["method"][:20]
        if status == 405:
            other = "POST" if method in ("GET", "HEAD") else "GET"
            return ApiError(status, f"{method} is not for {path}. Needed: {other}.")
        # Where clients stumble: a base URL without /v1, or with a slash too many.
        meant = next((each for each in (f"/v1{path}", path.rstrip("/")) if each in self.known_paths), None)
        known = sorted(each for each in self.known_paths if each.startswith("/v1/") and "{" not in each)
        needed = f"Did you mean {meant}?" if meant else f"Needed: one of {', '.join(known)}."
        return ApiError(status, f"There is nothing at {path}. {needed}")

    def _require_key(self, scope: Scope) -> None:
        if not self.keys or scope["path"] in self.open_paths:
            return
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = header.partition(b" ")
        # All are compared, each in a time that does not tell how much of it is right.
        matches = [hmac.compare_digest(key.strip(), known) for known in self.keys]
        if kind.lower() != b"bearer" or not any(matches):
            problem = "The key is not known" if header else "A key is needed"
            raise ApiError(401, f"{problem}. Send it as `Authorization: Bearer KEY`.", code="invalid_api_key")

    def _require_host(self, scope: Scope) -> None:
        if not self.is_local:
            return
        host = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if not is_loopback(name.strip("[]")):
            raise ApiError(403, f"The server answers for this machine only, not for the name {name[:100]!r}.")


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(file: str) -> list[bytes]:
    """One in a line; lines that begin with # say whose they are."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--api-key {file}: cannot be read ({error}). Needed: a text file, a key in each line."
        ) from None
    keys = [line.strip().encode() for line in lines if line.strip() and not line.startswith("#")]
    short = next((number for number, key in enumerate(keys, start=1) if len(key) < 16 or b" " in key), None)
    if not keys or short:
        problem = f"key number {short} is shorter than 16 characters or has a space" if short else "no key in it"
        raise UsageError(
            f"--api-key {file}: {problem}. Needed: a key of 16 characters or more in each line, such as "
            "`python -c 'import secrets; print(secrets.token_urlsafe())'` writes."
        )
    return keys
