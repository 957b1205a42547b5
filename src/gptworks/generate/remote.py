"""Text from a server of OpenAI's API (`gptworks generate --server URL`), as if it were an engine of this process."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from gptworks.config.schema import GenerateConfig
from gptworks.errors import GenerationError, UsageError
from gptworks.generate.engine import can_stream, settings_of
from gptworks.generate.result import Finish, Generation

KEY = "GPTWORKS_API_KEY"  # in the environment: sent with every request
_SECONDS = 600.0  # without a word from the server
# key of the section `generate` -> field of a request; the server reads this table too
FIELDS = {
    "min_new_tokens": "min_tokens",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "ignore_eod": "ignore_eos",
}


class RemoteEngine:
    """`model`: a name that the server knows; it has to be given where the server has several."""

    def __init__(self, url: str, model: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--server {url}: needs an address such as http://127.0.0.1:8000.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model

    def generations(self, prompts: str | Sequence[str], **settings: object) -> list[Generation]:
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        cfg = settings_of(settings)
        body = {**self._body(cfg), "prompt": texts, "logprobs": 0, "return_token_ids": True}
        with self._post(body) as answer:
            choices = json.load(answer)["choices"]
        return [
            self._generation(choice, texts[number // cfg.num_return_sequences], cfg)
            for number, choice in enumerate(choices)
        ]

    def stream(self, prompt: str, **settings: object) -> Iterator[str]:
        cfg = settings_of(settings)
        if not can_stream(cfg):
            raise GenerationError("streaming needs one text that is drawn token by token.")
        with self._post({**self._body(cfg), "prompt": prompt, "stream": True}) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise GenerationError(f"{self.url}: {event['error']['message']}")
                for choice in event["choices"]:
                    if choice["text"]:
                        yield choice["text"]

    def new_tokens_that_fit(self, prompts: list[str], **settings: object) -> list[int | None]:
        """The server knows its context, and says so where more is asked for."""
        return [None] * len(prompts)

    def _body(self, cfg: GenerateConfig) -> dict[str, Any]:
        usual = GenerateConfig()
        for name in ("rules", "window", "num_beams", "speculate"):
            if getattr(cfg, name) != getattr(usual, name):
                raise UsageError(
                    f"{name}: {getattr(cfg, name)} cannot be asked of a server. Leave it out, or --server."
                )
        body: dict[str, Any] = {
            field: getattr(cfg, name) for name, field in FIELDS.items() if getattr(cfg, name) != getattr(usual, name)
        }
        body |= {"seed": cfg.seed, "temperature": 0 if cfg.strategy == "greedy" else cfg.temperature}
        body["max_tokens"] = cfg.max_new_tokens
        if cfg.stop:
            body["stop"] = list(cfg.stop)
        if cfg.num_return_sequences != usual.num_return_sequences:
            body["n"] = cfg.num_return_sequences
        if cfg.best_of:
            body["best_of"] = cfg.best_of
        if cfg.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in cfg.biases.items()}
        return body | ({"model": self.model} if self.model else {})

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"content-type": "application/json"}
        if key := os.environ.get(KEY):
            headers["authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            return urllib.request.urlopen(request, timeout=_SECONDS)
        except urllib.error.HTTPError as error:
            raise GenerationError(f"{self.url}: {_error_message(error)}") from None
        except OSError as error:
            raise GenerationError(
                f"{self.url}: cannot be reached ({error}). Is `gptworks serve` running there?"
            ) from None

    def _generation(self, choice: dict[str, Any], prompt: str, cfg: GenerateConfig) -> Generation:
        is_stop = choice.get("stop_reason") is not None
        finish: Finish = "length" if choice["finish_reason"] == "length" else "stop" if is_stop else "eod"
        logprobs = choice["logprobs"]["token_logprobs"]
        return Generation(prompt, choice["text"], choice.get("token_ids", []), logprobs, finish, None, cfg.seed)


def _error_message(error: urllib.error.HTTPError) -> str:
    try:
        with error:
            message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
    return message + (f" The key is taken from the environment, {KEY}." if error.code == 401 else "")
