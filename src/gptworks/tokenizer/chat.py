"""A conversation as the text its model was trained on: the model's own Jinja template, rendered in a sandbox.

A template comes with the weights, from anybody. It sees the messages and a few names, reaches no attribute that
leads out, changes nothing, and ends: what it counts to, repeats and writes is bounded.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2

from gptworks.errors import TokenizerError
from gptworks.tokenizer import template_sandbox
from gptworks.tokenizer.tokenizer import Tokenizer

# What a template can bring about that asks for what is not there, or for too much.
_CAUSED = (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The text of a conversation, special tokens spelled out: `tokenizer.encode` makes ids of it, with nothing added.

    `messages`: {"role": "user", "content": "..."} and so on. `add_generation_prompt`: it ends where the model is to
    answer. `tools` and `variables` (such as enable_thinking) are for templates that ask for them.
    """
    if tokenizer.special.chat_template is None:
        raise TokenizerError(
            f"{tokenizer.name}: has no chat template, so nobody knows how the model was told who speaks. "
            "Give it plain text, or a model that was trained on conversations (its tokenizer_config.json has one)."
        )
    _require_messages(messages)
    roles = {"eos_token": tokenizer.eod_token, "bos_token": tokenizer.special.bos_token}
    roles |= {"unk_token": tokenizer.special.unk_token, "pad_token": tokenizer.special.pad_token}
    known = {role: token for role, token in roles.items() if token is not None}
    return render_template(
        tokenizer.special.chat_template,
        {**known, **variables, "messages": [dict(each) for each in messages], "tools": tools, "documents": None}
        | {"add_generation_prompt": add_generation_prompt},
        where=tokenizer.name,
    )


def render_template(template: str, variables: Mapping[str, Any], *, where: str) -> str:
    """`where`: the file that it comes from, for the error."""
    try:
        template_sandbox.WORK.begin(template)
        compiled = _compiled(template)
        pieces, size = [], 0
        for piece in compiled.generate(**variables):
            size += len(piece)
            template_sandbox.require_short(size)
            pieces.append(piece)
        return "".join(pieces)
    except template_sandbox.Refused as refusal:
        raise TokenizerError(f"{where}: its chat template refuses the messages: {refusal}") from None
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(
            f"{where}: its chat template is not valid Jinja, line {error.lineno}: {error.message}. Fix it in "
            "tokenizer_config.json, or remove it."
        ) from None
    except (RecursionError, MemoryError) as error:
        raise TokenizerError(f"{where}: its chat template does not end ({type(error).__name__}).") from None
    except _CAUSED as error:
        raise TokenizerError(
            f"{where}: its chat template cannot be rendered ({type(error).__name__}: {str(error)[:300]})."
        ) from None


def _require_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise TokenizerError("messages: got none, needed at least one such as {'role': 'user', 'content': 'Hello'}.")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokenizerError(
                f"messages: number {number} is {str(message)[:80]}, needed {{'role': 'user', 'content': 'Hello'}}."
            )


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    most = template_sandbox.MOST_TEMPLATE
    if len(template) > most:
        raise template_sandbox.TooMuchError(f"it has {len(template):,} characters, at most {most:,}")
    return template_sandbox.Sandbox().from_string(template)
