"""What a client is told when a request cannot be answered: OpenAI's error object, with its status."""

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "overloaded_error"}
_TYPES |= {504: "timeout_error", 500: "api_error"}


class ApiError(Exception):
    """`param`: the field of the request that is wrong. `retry_after`: seconds after which trying again may help."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"retry-after": str(self.retry_after)} if self.retry_after else {}
        if self.status in (408, 413):  # the rest of the body is not waited for
            headers["connection"] = "close"
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})
