"""Chat templates: what transformers renders, and what a bad one may not do."""

from typing import Any

import pytest
import tokenizers

from gptworks.errors import TokenizerError
from gptworks.tokenizer import Tokenizer, chat
from gptworks.tokenizer.special_tokens import SpecialTokens

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{%- for message in messages %}\n    {%- set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}\n    {%- if loop.index0 == 0 %}\n"
    "        {%- set content = bos_token + content %}\n    {%- endif %}\n    {{- content }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}"
)
TOOLS = (
    "{%- if tools %}{{ '# Tools\n' }}{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{%- endfor %}{%- endif %}"
    "{%- set ns = namespace(last='') %}{%- for message in messages %}{%- if message.role == 'stop' %}{%- break %}"
    "{%- endif %}{%- set ns.last = message.content %}{{ loop.index ~ ': ' ~ message.content.split('</think>')[-1] }}"
    "{% generation %}{{ message.content | replace('a', 'b') }}{% endgeneration %}"
    "{%- endfor %}{{ '|'.join(['x', ns.last]) }}{{ [1, 2] | join('-') }}{{ eos_token }}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": " Was heißt 天气? <think>x</think> banana "},
    {"role": "assistant", "content": "Wetter."},
]
TOOL = [{"type": "function", "function": {"name": "weather", "description": "é <b> 天"}}]


def tokenizer_with(template: str | None, small: Tokenizer) -> Tokenizer:
    special = SpecialTokens(bos_token="<|bos|>", chat_template=template)
    return Tokenizer(small.backend, name="model", special=special)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, TOOLS], ids=["chatml", "llama3", "tools"])
@pytest.mark.parametrize("is_asked", [True, False])
def test_as_transformers_renders_it(template: str, is_asked: bool, small_tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = tokenizer_with(template, small_tokenizer)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(ours.backend.to_str()),
        bos_token="<|bos|>",
        eos_token=ours.eod_token,
        chat_template=template,
    )
    wanted = theirs.apply_chat_template(MESSAGES, tools=TOOL, tokenize=False, add_generation_prompt=is_asked)
    assert chat.render(ours, MESSAGES, tools=TOOL, add_generation_prompt=is_asked) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{% if %}", "is not valid Jinja, line 1"),
        ("a\nb{{ x", "is not valid Jinja, line 2"),
        ("{{ nobody.knows.it }}", "'nobody' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "__class__"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1,000,000 steps"),
        ("{{ 'x' * 10**9 }}", "more than 16,777,216 characters"),
        ("{{ 10 ** 99999 }}", "to the power 99999"),
        ("{{ '%99999999d' % 1 }}", "formats text with %"),
        ("{{ 'x'.center(99999999) }}", "center"),
        ("{{ 'x' | center(99999999) }}", "center"),
        ("{{ messages | tojson(indent=99999999) }}", "indents JSON by 99999999"),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "more than 16",
        ),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "more than 16",
        ),
        ("{% for i in range(60000) %}{{ 'x' * 300 }}{% endfor %}", "more than 16,777,216"),
        ("{{ ('x' * 9999).replace('x', 'y' * 9999) }}", "more than 16,777,216"),
        ("{{ ('y' * 9999).join(['x'] * 9999) }}", "more than 16,777,216"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "does not end"),
        ("{{ '{:>99999999}'.format(1) }}", "formats text with a width"),
        ("{{ '{:>{}}'.format(1, 99999999) }}", "formats text with a width"),
        ("{{ '{x:>99999999}'.format_map({'x': 1}) }}", "formats text with a width"),
        ("{{ (1).to_bytes(99999999) }}", "to_bytes"),
        ("{{ 'x'.encode() * 99999999 }}", "encode"),
        ("{{ ('x' * 9999).translate({120: 'y' * 9999}) }}", "translate"),
        ("{{ [1] | batch(99999999, 1) | list }}", "batch"),
        ("{{ [1] | slice(99999999) | list }}", "slice"),
        ("{{ ([[1]] * 100000) | sum(start=[]) }}", "sum"),
        ("{{ ('ab' * 8000000) | unique | list }}", "more than 1,000,000 steps"),
        ("{{ ('x' * 16000000) | escape }}", "more than 1"),
        ("{{ messages | tojson(indent='x' * 9999) }}", "TypeError"),
        ("{{ 'x' | indent('y' * 9999) }}", "indents text by yyy"),
        ("{{ cycler() }}", "RuntimeError"),
        (
            "{% set x = range(10000) | list %}{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}"
            "{% endfor %}",
            "more than 1,000,000 steps",
        ),
        (
            "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set a = f(n - 1) %}{% endif %}{% endmacro %}"
            "{{ f(40) }}",
            "more than 1,000,000 steps",
        ),
        (
            "{% for a in [1, 2] recursive %}{% if loop.depth < 40 %}{% set x = loop([1, 2]) %}{% endif %}{% endfor %}",
            "more than 1,000,000 steps",
        ),
        ("{% set n = namespace(x=2) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}", "4,096 bits"),
        (
            "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
            "more than 1",
        ),
        (
            "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"
            "{% endfor %}",
            "more than 16,777,216",
        ),
    ],
)
def test_templates_that_are_wrong(template: str, message: str, small_tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"^model: its chat template") as caught:
        chat.render(tokenizer_with(template, small_tokenizer), MESSAGES)
    assert message in str(caught.value) and len(str(caught.value)) < 600


def test_without_a_template_or_messages(small_tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="model: has no chat template"):
        chat.render(tokenizer_with(None, small_tokenizer), MESSAGES)
    for bad in ([], ["hello"], [{"content": "x"}], [{"role": 5}]):
        with pytest.raises(TokenizerError, match="messages: "):
            chat.render(tokenizer_with(CHATML, small_tokenizer), bad)  # type: ignore[arg-type]
