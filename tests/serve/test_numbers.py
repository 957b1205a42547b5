"""What a server makes of a prompt, and of large numbers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gptworks.serve.metrics import Counter
from gptworks.serve.rows import tokens_of
from gptworks.tokenizer import Tokenizer


def test_a_prompt_begins_as_generate_begins_it() -> None:
    tokenizer = Tokenizer.from_pretrained("gpt2")
    tokenizer.special = replace(tokenizer.special, bos_token="<|endoftext|>", adds_bos=True)
    served: Any = SimpleNamespace(tokenizer=tokenizer)
    assert tokens_of(served, "Hello world", 1) == [50256, 15496, 995] == tokenizer.encode_prompt("Hello world")


def test_a_count_keeps_all_its_digits() -> None:
    counter = Counter("tokens_total", "Tokens.")
    counter.add(1_234_567)
    assert list(counter.lines())[-1] == "tokens_total 1234567"
    counter.add(0.25)
    assert list(counter.lines())[-1] == "tokens_total 1234567.25"
