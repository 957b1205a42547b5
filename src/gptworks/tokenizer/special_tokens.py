"""What tokenizer_config.json says beside the end of document: what comes before a prompt, how a chat is written."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptworks import json_text
from gptworks.errors import TokenizerError

CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_ROLES = ("bos_token", "unk_token", "pad_token")
_LARGEST_TEMPLATE = 1 << 20  # bytes


@dataclass(frozen=True)
class SpecialTokens:
    """None is what nobody says. `adds_bos` wins over what tokenizer.json has for it (its post_processor)."""

    bos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    adds_bos: bool | None = None
    chat_template: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Without what nobody says."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SpecialTokens":
        """The reverse. ValueError where it is something else."""
        for name, value in values.items():
            if name not in cls.__dataclass_fields__ or not isinstance(value, bool if name == "adds_bos" else str):
                raise ValueError(f"special tokens: {name} is {str(value)[:40]!r}")
        return cls(**values)

    def as_config(self, eod_token: str | None) -> dict[str, Any]:
        """For tokenizer_config.json. Where nothing is known of it, the end of document is everything, as in GPT-2."""
        config: dict[str, Any] = {role: token for role in _ROLES if (token := getattr(self, role)) is not None}
        if eod_token:
            others = config or dict.fromkeys(("bos_token", "unk_token"), eod_token)
            config = {"eos_token": eod_token, **others}
        if self.adds_bos is not None:
            config["add_bos_token"] = self.adds_bos
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return config


def read_config(config_file: Path) -> dict[str, Any]:
    """tokenizer_config.json, which need not be there."""
    if not config_file.is_file():
        return {}
    try:
        config = json_text.loads(config_file.read_text(encoding="utf-8"))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise TokenizerError(f"{config_file}: not a JSON object. Fix or remove it.")
    return config


def eos_of(config_file: Path) -> str | None:
    return _token(read_config(config_file), "eos_token", config_file)


def special_tokens_of(config_file: Path) -> SpecialTokens:
    config = read_config(config_file)
    adds_bos = config.get("add_bos_token")
    if adds_bos is not None and not isinstance(adds_bos, bool):
        raise TokenizerError(f"{config_file}: add_bos_token is {json.dumps(adds_bos)}, needed true or false. Fix it.")
    tokens = {role: _token(config, role, config_file) for role in _ROLES}
    return SpecialTokens(**tokens, adds_bos=adds_bos, chat_template=_chat_template(config, config_file))


def _token(config: dict[str, Any], role: str, config_file: Path) -> str | None:
    token = config.get(role)
    name = token.get("content", token) if isinstance(token, dict) else token
    if not isinstance(name, str | None):
        raise TokenizerError(f"{config_file}: {role} is {json.dumps(token)}, needed a text. Fix or remove it.")
    return name


def _chat_template(config: dict[str, Any], config_file: Path) -> str | None:
    """In the file, in a file of its own beside it, or the one called `default` of several."""
    beside = config_file.with_name(CHAT_TEMPLATE)
    if beside.is_file():
        if beside.stat().st_size > _LARGEST_TEMPLATE:
            raise TokenizerError(f"{beside}: {beside.stat().st_size:,} bytes, at most {_LARGEST_TEMPLATE:,}.")
        try:
            return beside.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise TokenizerError(f"{beside}: not UTF-8. Fix or remove it.") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    if not isinstance(template, str | None):
        raise TokenizerError(f"{config_file}: chat_template is {json.dumps(template)[:80]}, needed a text. Fix it.")
    return template
