"""A conversation as the text its model was trained on: the model's own Jinja template, rendered in a sandbox.

A template comes with the weights, from anybody. It sees the messages and a few names, reaches no attribute that
leads out, changes nothing, and ends: what it counts to, repeats and writes is bounded.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.visitor
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gptworks.errors import TokenizerError
from gptworks.tokenizer.tokenizer import Tokenizer

_MOST_TEMPLATE = 1 << 20  # characters of a template
_MOST_TEXT = 16 << 20  # characters it may write, and any text or list it may make by + * and %
_MOST_ROUNDS = 1_000_000  # numbers that all its ranges may have together
_LARGEST_POWER = 64


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
        compiled = _compiled(template)
        pieces, size = [], 0
        compiled.environment.globals["range"] = _CountedRange()
        for piece in compiled.generate(**variables):
            size += len(piece)
            _require_short(size)
            pieces.append(piece)
        return "".join(pieces)
    except _Refused as refusal:
        raise TokenizerError(f"{where}: its chat template refuses the messages: {refusal}") from None
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(
            f"{where}: its chat template is no Jinja, line {error.lineno}: {error.message}. Fix it in "
            "tokenizer_config.json, or remove it."
        ) from None
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(
            f"{where}: its chat template cannot be rendered ({type(error).__name__}: {str(error)[:300]})."
        ) from None
    except (RecursionError, MemoryError) as error:
        raise TokenizerError(f"{where}: its chat template does not end ({type(error).__name__}).") from None


def _require_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise TokenizerError("messages: got none, needed at least one such as {'role': 'user', 'content': 'Hello'}.")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokenizerError(
                f"messages: number {number} is {str(message)[:80]}, needed {{'role': 'user', 'content': 'Hello'}}."
            )


class _Refused(Exception):  # a template's own words, not a fault
    pass


class _TooMuchError(jinja2.TemplateError):
    pass


def _require_short(size: int) -> None:
    if size > _MOST_TEXT:
        raise _TooMuchError(f"it makes a text of more than {_MOST_TEXT:,} characters")


class _CountedRange:
    """`range` that knows how far all loops of one rendering have gone together."""

    def __init__(self) -> None:
        self.left = _MOST_ROUNDS

    def __call__(self, *bounds: int) -> range:
        found = range(*bounds)
        self.left -= len(found)
        if self.left < 0:
            raise _TooMuchError(f"its loops count to more than {_MOST_ROUNDS:,}")
        return found


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks what a model is trained on; here it is text like any other."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 2**_LARGEST_POWER or abs(right) > _LARGEST_POWER):
            raise _TooMuchError(f"it takes {str(left)[:20]} to the power {str(right)[:20]}")
        if operator == "*" and (isinstance(left, _SIZED) or isinstance(right, _SIZED)):
            of, times = (left, right) if isinstance(left, _SIZED) else (right, left)
            _require_short(len(of) * times if isinstance(times, int) else 0)
        if operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _require_short(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            raise _TooMuchError("it formats text with %, which is not allowed: a width may be anything")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        """Texts that are put together by ~ are counted as those by +."""
        return _ConcatAsSum().visit(super()._parse(source, name, filename))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        text = getattr(obj, "__self__", None)
        if isinstance(text, str) and obj.__name__ == "replace" and len(args) >= 2:
            _require_short(_replaced_size(text, *args[:2]))
        if isinstance(text, str) and obj.__name__ == "join" and args:
            args = (list(args[0]),)
            _require_short(_joined_size(args[0], text))
        return super().call(context, obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Methods of texts that take a width would get around the bound."""
        is_wide = isinstance(obj, str) and attr in ("center", "ljust", "rjust", "zfill", "expandtabs", "format_map")
        return not is_wide and super().is_safe_attribute(obj, attr, value)


class _ConcatAsSum(jinja2.visitor.NodeTransformer):
    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Expr:
        parts = [self.visit(part) for part in node.nodes]
        texts = [jinja2.nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in parts]
        found: jinja2.nodes.Expr = texts[0]
        for text in texts[1:]:
            found = jinja2.nodes.Add(found, text, lineno=node.lineno)
        return found


def _replaced_size(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * len(new)


def _joined_size(parts: Sequence[Any], between: str) -> int:
    return sum(len(str(part)) + len(between) for part in parts)


def _join(values: Any, between: str = "", attribute: str | None = None) -> str:
    parts = [value[attribute] if attribute is not None else value for value in values]
    _require_short(_joined_size(parts, between))
    return between.join(map(str, parts))


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    _require_short(_replaced_size(str(text), old, new))
    return str(text).replace(old, new, -1 if count is None else count)


_SIZED = (str, list, tuple)
_WIDE_FILTERS = ("center", "format", "wordwrap", "xmlattr", "urlize", "filesizeformat", "pprint")


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > _MOST_TEMPLATE:
        raise _TooMuchError(f"it has {len(template):,} characters, at most {_MOST_TEMPLATE:,}")
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    for name in _WIDE_FILTERS:
        del sandbox.filters[name]
    del sandbox.globals["lipsum"]
    sandbox.filters |= {"indent": _indent, "join": _join, "replace": _replace, "tojson": _to_json}
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return sandbox.from_string(template)


def _refuse(message: object) -> str:
    raise _Refused(str(message)[:500])


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own would spell < and > for HTML."""
    if indent is not None and indent > _LARGEST_POWER:
        raise _TooMuchError(f"it indents JSON by {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if isinstance(width, int) and width > _LARGEST_POWER:
        raise _TooMuchError(f"it indents text by {width}")
    return jinja2.filters.do_indent(text, width, first, blank)
