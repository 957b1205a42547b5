"""The sandbox of chat templates: what one may reach, and how much it may do.

Every round of a loop, every call and every filter is counted, with what it goes through; so nothing goes on for long,
whether it is asked to in one step or in many small ones.
"""

import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.runtime
import jinja2.visitor
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_TEMPLATE = 1 << 20  # characters of a template
_MOST_TEXT = 16 << 20  # characters it may write, and any text or list it may make by + * and %
_MOST_WORK = 1_000_000  # rounds, calls, values gone through by filters: some seconds
_CALL = 20  # of them, since a call takes that much longer than a round
_LARGEST_POWER = 64
_LARGEST_NUMBER = 4096  # bits
_WIDE_SPEC = re.compile(r":[^{}]*(\d{4,}|\{)")  # of str.format: a width, or one that is filled in


class Refused(Exception):  # a template's own words, not a fault
    pass


class TooMuchError(jinja2.TemplateError):
    pass


class _Work(threading.local):
    """What one rendering may still do. A template is compiled once and may be rendered by many threads."""

    left, written, unit = 0, 0, 1

    def begin(self, template: str) -> None:
        """Each round may write as much as stands in the template."""
        self.left, self.written, self.unit = _MOST_WORK, 0, 1 + len(template) // 400

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise TooMuchError(f"it does more than {_MOST_WORK:,} steps")


WORK = _Work()


def require_short(size: int) -> None:
    if size > _MOST_TEXT:
        raise TooMuchError(f"it makes a text of more than {_MOST_TEXT:,} characters")


def _counted(values: Any) -> Any:
    """What a loop goes through."""
    if isinstance(values, jinja2.Undefined):
        return values
    return _each(values) if not hasattr(values, "__len__") else _paid(values)


def _paid(values: Any) -> Any:
    WORK.spend(len(values) * WORK.unit)
    return values


def _each(values: Any) -> Iterator[Any]:
    for value in values:
        WORK.spend(WORK.unit)
        yield value


def _weigh(value: Any) -> None:
    """Before it becomes a text: a list that holds another twice, and that one another twice, is longer than it is."""
    stack, size = [value], 0
    while stack:
        value = stack.pop()
        WORK.spend(1)
        if isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            stack += value
        size += len(value) if isinstance(value, str) else 4
        require_short(size)


def _written(value: Any) -> Any:
    """Each piece of text that is put out, also into a block that is kept as a value."""
    if not isinstance(value, str | jinja2.Undefined):
        _weigh(value)
    text = str(value)
    WORK.written += len(text)
    require_short(WORK.written)
    return value


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks what a model is trained on; here it is text like any other."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self) -> None:
        extensions = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_written)
        for name in _NO_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters |= {"indent": _indent, "join": _join, "replace": _replace, "tojson": _to_json}
        self.filters = {name: _paying(function) for name, function in self.filters.items()}
        self.filters |= {_COUNTED: _counted, "string": _string}  # which count for themselves
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now, "range": range}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 2**_LARGEST_POWER or abs(right) > _LARGEST_POWER):
            raise TooMuchError(f"it takes {str(left)[:20]} to the power {str(right)[:20]}")
        if operator == "*" and (isinstance(left, _SIZED) or isinstance(right, _SIZED)):
            of, times = (left, right) if isinstance(left, _SIZED) else (right, left)
            require_short(len(of) * times if isinstance(times, int) else 0)
        if operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            require_short(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            raise TooMuchError("it formats text with %, which is not allowed: a width may be anything")
        value = super().call_binop(context, operator, left, right)
        if isinstance(value, int) and value.bit_length() > _LARGEST_NUMBER:
            raise TooMuchError(f"it makes a number of more than {_LARGEST_NUMBER:,} bits")
        WORK.spend(1 + (len(value) // 100 if isinstance(value, _SIZED) else 0))
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        """Texts that are put together by ~ are counted as those by +, and what loops go through is counted."""
        return _Counting().visit(super()._parse(source, name, filename))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        text = getattr(obj, "__self__", None)
        WORK.spend(_CALL + WORK.unit + (len(text) // 100 if isinstance(text, _SIZED) else 0))
        if isinstance(text, str) and obj.__name__ == "replace" and len(args) >= 2:
            require_short(_replaced_size(text, *args[:2]))
        if isinstance(text, str) and obj.__name__ == "join" and args:
            args = (list(args[0]),)
            require_short(_joined_size(args[0], text))
        if isinstance(obj, jinja2.runtime.LoopContext) and args:  # a loop in itself
            args = (_counted(args[0]), *args[1:])
        return super().call(context, obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Methods of texts that take a width would get around the bound, and so would those of numbers and bytes."""
        is_wide = isinstance(obj, str) and attr in _WIDE_METHODS
        is_of_number = isinstance(obj, int | float | bytes) and callable(value)
        return not (is_wide or is_of_number) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is not None and _WIDE_SPEC.search(value.__self__):
            raise TooMuchError(f"it formats text with a width that may be anything: {value.__self__[:40]!r}")
        return formatted


_COUNTED = "counted by the sandbox"  # no name that a template can write
_SIZED = (str, list, tuple)
_WIDE_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs", "encode", "translate")
_NO_FILTERS = ("center", "format", "wordwrap", "xmlattr", "urlize", "filesizeformat", "pprint", "batch", "slice",
               "sum", "forceescape")  # fmt: skip


class _Counting(jinja2.visitor.NodeTransformer):
    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Expr:
        parts = [self.visit(part) for part in node.nodes]
        texts = [jinja2.nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in parts]
        joined: jinja2.nodes.Expr = texts[0]
        for text in texts[1:]:
            joined = jinja2.nodes.Add(joined, text, lineno=node.lineno)
        return joined

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        self.generic_visit(node)
        node.iter = jinja2.nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node


def _paying(function: Any) -> Any:
    """A filter that is counted with the length of what it is applied to."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # with the marks that Jinja reads
    def paying(*args: Any, **kwargs: Any) -> Any:
        value: Any = args[place] if len(args) > place else ()
        size = len(value) if hasattr(value, "__len__") else 0
        WORK.spend(1 + (size // 10 if isinstance(value, str) else size))
        result = function(*args, **kwargs)
        if isinstance(result, _SIZED):
            require_short(len(result))
        return result

    return paying


def _replaced_size(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * len(new)


def _joined_size(parts: Sequence[Any], between: str) -> int:
    for part in parts:
        _weigh(part)
    return sum(len(str(part)) + len(between) for part in parts)


def _join(values: Any, between: str = "", attribute: str | None = None) -> str:
    parts = [value[attribute] if attribute is not None else value for value in values]
    require_short(_joined_size(parts, between))
    return between.join(map(str, parts))


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    text = _string(text)
    require_short(_replaced_size(text, old, new))
    return text.replace(old, new, -1 if count is None else count)


def _string(value: Any) -> str:
    if not isinstance(value, str | jinja2.Undefined):
        _weigh(value)
    return str(value)


def _refuse(message: object) -> str:
    raise Refused(_string(message)[:500])


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
        raise TooMuchError(f"it indents JSON by {indent}")
    _weigh(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if (len(width) if isinstance(width, str) else width) > _LARGEST_POWER:
        raise TooMuchError(f"it indents text by {str(width)[:40]}")
    return jinja2.filters.do_indent(text, width, first, blank)
