"""gptworks generate as a user calls it: where prompts come from, streaming, JSON, the interactive mode, mistakes."""

import importlib.util
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gptworks
from gptworks.cli import generate as verb
from gptworks.config.schema import GenerateConfig
from gptworks.generate.engine import generations

Call = Callable[..., Any]
SHORT = ["--max-new-tokens", 6]


@pytest.fixture(scope="module")
def model_folder(_finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: it has no settings of its own."""
    step = max((_finished / "checkpoints").glob("step-*"))
    return Path(shutil.copytree(step / "portable", tmp_path_factory.mktemp("cli") / "portable"))


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    return gptworks.GPT.from_pretrained(model_folder)


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What standard input has."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_every_setting_has_an_option() -> None:
    assert set(verb._SETTINGS) == set(GenerateConfig.model_fields)


def test_options_reach_the_generation(model_folder: Path, model: Any, call: Call) -> None:
    options = {
        "--temperature": 0.8, "--top-k": 30, "--top-p": 0.9, "--min-p": 0.01, "--typical-p": 0.95,
        "--repetition-penalty": 1.1, "--presence-penalty": 0.2, "--frequency-penalty": 0.1, "--no-repeat-ngram": 2,
        "--min-new-tokens": 2, "--max-new-tokens": 7, "--num-return-sequences": 2, "--best-of": 3, "--seed": 5,
        "--window": "slide", "--logit-bias": "70:1.5", "--stop": "zzz", "--rules": "huggingface",
    }  # fmt: skip
    flat = [str(part) for option in options.items() for part in option]
    out = call("generate", "--model", model_folder, "--prompt", "Anna", *flat, "--ignore-eod", "--json").out
    given = {name[2:].replace("-", "_"): value for name, value in options.items()}
    expected = generations(model, "Anna", ignore_eod=True, **given)
    assert [json.loads(line) for line in out.splitlines()] == [vars(found) for found in expected]
    beam = {"strategy": "beam", "num_beams": 4, "length_penalty": 0.5, "num_beam_groups": 2, "diversity_penalty": 1.5}
    flat = [str(part) for name, value in beam.items() for part in ("--" + name.replace("_", "-"), value)]
    out = call("generate", "--model", model_folder, "--prompt", "Anna", *flat, *SHORT, "--early-stopping", "true").out
    assert out == "Anna" + generations(model, "Anna", max_new_tokens=6, early_stopping=True, **beam)[0].text + "\n"


def test_where_prompts_come_from(model_folder: Path, tmp_path: Path, call: Call, type_in: Any) -> None:
    def told(*args: object) -> list[str]:
        lines = call("generate", "--model", model_folder, *SHORT, "--json", *args).out.splitlines()
        return [json.loads(line)["prompt"] for line in lines]

    (tmp_path / "p.jsonl").write_text('{"prompt": "Anna\\nTom", "other": 1}\n\n{"prompt": "你好"}\n', encoding="utf-8")
    (tmp_path / "p.txt").write_bytes(b"Anna\r\n\r\n Tom\r\n")
    assert told("--prompt", "a", "--prompt", "b") == ["a", "b"]
    assert told("--prompts", tmp_path / "p.jsonl") == ["Anna\nTom", "你好"]
    assert told("--prompts", tmp_path / "p.txt") == ["Anna", " Tom"]
    type_in("one\ntwo\n")
    assert told("--prompts", "-") == ["one", "two"]
    type_in("one\ntwo\n")
    assert told("--prompt", "-") == ["one\ntwo"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "p.jsonl, line 2: not JSON"),
        ('["a"]\n', 'p.jsonl, line 1: got ["a"]; needed an object with a text "prompt"'),
        ('{"text": "a"}\n', 'p.jsonl, line 1: got {"text": "a"}'),
        ('{"prompt": 5}\n', 'p.jsonl, line 1: got {"prompt": 5}'),
        ("\n \n", "p.jsonl: no prompt in it"),
    ],
)
def test_a_file_of_prompts_that_is_none(
    content: str, said: str, model_folder: Path, tmp_path: Path, call: Call
) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    assert said in call("generate", "--model", model_folder, "--prompts", tmp_path / "p.jsonl", expect=2).err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--top-k", 513], "error: --top-k: 513 is above the vocabulary (512 tokens)"),
        (["--top-k", -1], "  --top-k: got -1"),
        (["--temperature", 0], "--temperature: got 0.0; needs a number above 0"),
        (["--temperature", -2], "use --strategy greedy"),
        (["--strategy", "magic"], "invalid choice: 'magic'"),
        (
            ["--num-beams", 3],
            "--num-beams: 3 needs --strategy beam, got sampling. Set --strategy beam, or --num-beams 1.",
        ),
        (["--logit-bias", "x"], "'x' is not ID:BIAS"),
        (["--logit-bias", "600:1"], "token 600 is not in the vocabulary (512 tokens)"),
        (["--stop", ""], "--stop: got ''"),
        (["--max-new-tokens", 0], "--max-new-tokens: got 0"),
        (["--rules", "paddle", "--min-p", 0.1], "--min-p: is set, but --rules paddle has no such setting"),
        (["--stream", "--prompt", "another"], "--stream: needs one prompt"),
        (["--stream", "--json"], "--stream: needs one prompt"),
        (["--stream", "--best-of", 2], "--stream: needs one prompt"),
    ],
)
def test_mistakes(options: list[Any], said: str, model_folder: Path, call: Call) -> None:
    done = call("generate", "--model", model_folder, "--prompt", "Anna", *SHORT, *options, expect=2)
    assert said in done.err and "Traceback" not in done.err and done.out == ""


def test_longer_than_the_context(model_folder: Path, call: Call) -> None:
    long = ["generate", "--model", model_folder, "--prompt", "Anna walked " * 20, *SHORT]
    assert "or let the window slide" in call(*long, expect=2).err
    assert call(*long, "--window", "slide").out.startswith("Anna walked Anna")


def test_streaming_writes_the_same_text(model_folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["generate", "--model", model_folder, "--prompt", "The river", "--max-new-tokens", 15, "--seed", 2]
    plain = call(*command).out
    written: list[str] = []
    real = print

    def spy(*args: Any, **keywords: Any) -> None:
        written.append(str(args[0]) if args else "")
        real(*args, **keywords)

    monkeypatch.setattr("builtins.print", spy)
    assert call(*command, "--stream").out == plain
    assert len(written) > 5 and written[0].startswith("The river")


def test_several_texts_of_one_prompt_are_set_apart(model_folder: Path, call: Call) -> None:
    out = call("generate", "--model", model_folder, "--prompt", "The river", *SHORT, "--num-return-sequences", 3).out
    assert out.count("\n---\nThe river") == 2


# Interactive


def test_a_conversation(model_folder: Path, model: Any, call: Call, type_in: Any) -> None:
    type_in(
        "Anna\n/set strategy greedy\nAnna\n/set max_new_tokens 3\nAnna\n\n/reset\nAnna\n//x\nAnna\n/quit\nnever read\n"
    )
    done = call("generate", "--model", model_folder, "--interactive", *SHORT, "--seed", 9)
    asked = (("Anna", 9), ("/x", 10), ("Anna", 11))  # each answer is a draw of its own
    sampled, slash, again = (generations(model, p, max_new_tokens=6, seed=seed)[0].text for p, seed in asked)
    assert sampled != again
    greedy, short = (generations(model, "Anna", strategy="greedy", max_new_tokens=n, seed=9)[0].text for n in (6, 3))
    before_reset, shown = done.out.split(f"Anna{short}\n")
    assert before_reset == f'Anna{sampled}\nstrategy: "greedy"\nAnna{greedy}\nmax_new_tokens: 3\n'
    assert shown.startswith('strategy: "sampling"\nmax_new_tokens: 6\n')
    assert shown.endswith(f"Anna{sampled}\n/x{slash}\nAnna{again}\n")
    assert done.err == ""


def test_texts_of_several_prompts_are_told_apart(model_folder: Path, model: Any, call: Call, type_in: Any) -> None:
    texts = [generations(model, p, strategy="greedy", max_new_tokens=6)[0].text for p in ("Anna", "b")]
    expected = f"Anna{texts[0]}\n---\nb{texts[1]}\n"
    given = ("generate", "--model", model_folder, "--strategy", "greedy", *SHORT)
    assert call(*given, "--prompt", "Anna", "--prompt", "b").out == expected
    for typed in ("Anna\nb\n", '{"prompt": "Anna"}\n{"prompt": "b"}\n'):
        type_in(typed)
        assert call(*given, "--prompts", "-").out == expected


def test_settings_are_shown_and_changed(model_folder: Path, call: Call, type_in: Any) -> None:
    type_in('/set stop ["a", "b"]\n/set early_stopping never\n/set logit_bias 5:-2\n/show\n/help\n')
    out = call("generate", "--model", model_folder, "--interactive", "--top-k", 7, "--seed", 42).out
    assert out.startswith('stop: ["a", "b"]\nearly_stopping: "never"\nlogit_bias: ["5:-2"]\nstrategy: ')
    for line in ("top_k: 7", 'stop: ["a", "b"]', "temperature: 1.0", "seed: 42"):
        assert line in out.splitlines()
    assert "/reset" in out


def test_a_conversation_on_a_short_context(model_folder: Path, call: Call, type_in: Any) -> None:
    """Nobody asked for 64 new tokens; who asks for them is told that they do not fit."""
    type_in("Anna\n/set max_new_tokens 64\nAnna\n")
    done = call("generate", "--model", model_folder, "--interactive", "--strategy", "greedy", "--ignore-eod")
    assert done.out.startswith("Anna") and len(done.out.split("max_new_tokens: 64")[0]) > 20
    assert done.err.count("new tokens, as many as fit the model's context") == 1
    assert "64 more were asked for" in done.err.split("error: ")[1]


def test_mistakes_in_a_conversation_change_nothing(model_folder: Path, call: Call, type_in: Any) -> None:
    typed = ["/set temperature 0", "/set temprature 1", "/set top_k", "/fly", "/set max_new_tokens 99", "Anna"]
    type_in("\n".join([*typed, "/set max_new_tokens 2", "/set strategy beam", "Anna"]))
    done = call("generate", "--model", model_folder, "--interactive", "--strategy", "greedy")
    said = done.err.split("error: ")[1:]
    assert len(said) == 6
    assert "\n  temperature: got 0; needs a number above 0" in said[0]
    assert "did you mean 'temperature'" in said[1]
    assert "/set top_k: needs a key and a value" in said[2]
    assert "/fly: no such command" in said[3]
    assert "99 more were asked for" in said[4]
    assert "num_beams: 1, but strategy is beam" in said[5]
    assert done.out.splitlines()[0] == "max_new_tokens: 99" and done.out.count("Anna") == 1


def test_several_beams_in_a_conversation(model_folder: Path, model: Any, call: Call, type_in: Any) -> None:
    type_in("Anna\n")
    beam: dict[str, Any] = {"strategy": "beam", "num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 6}
    flat = [str(part) for name, value in beam.items() for part in ("--" + name.replace("_", "-"), value)]
    out = call("generate", "--model", model_folder, "--interactive", *flat).out
    assert out == "".join(f"Anna{found.text}\n" for found in generations(model, "Anna", **beam))


def test_through_a_real_pipe(model_folder: Path, run_cli: Any) -> None:
    """One process: standard output in UTF-8 and nothing but the text in it."""
    done = run_cli("generate", "--model", model_folder, "--prompt", "你好", *SHORT, "--stream", "--strategy", "greedy")
    assert done.stdout.startswith("你好") and done.stderr == ""


def test_weights_in_fewer_bits(model_folder: Path, model: Any, call: Call) -> None:
    greedy = ["generate", "--model", model_folder, "--prompt", "Anna", *SHORT, "--strategy", "greedy", "--json"]
    found = {kind: json.loads(call(*greedy, "--weights", kind).out) for kind in ("fp32", "bf16", "int8", "int4")}
    exact = generations(model, "Anna", strategy="greedy", max_new_tokens=6)[0]
    assert found["fp32"]["logprobs"] == pytest.approx(exact.logprobs, abs=1e-5)
    for kind, closeness in (("bf16", 0.02), ("int8", 0.1), ("int4", 0.5)):
        assert found[kind]["logprobs"] != found["fp32"]["logprobs"]
        assert found[kind]["logprobs"][0] == pytest.approx(exact.logprobs[0], abs=closeness)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama.cpp is installed here")
def test_a_text_is_drawn_anew_and_its_seed_is_shown(model_folder: Path, call: Call, type_in: Any) -> None:
    given = ["generate", "--model", model_folder, "--prompt", "Anna", *SHORT]
    drawn = [call(*given) for _ in range(4)]
    assert len({done.out for done in drawn}) > 1
    note = re.compile(r"note: the seed was drawn at random; --seed (\d+) repeats this text\n")
    for done in drawn:
        seed = note.fullmatch(done.err)
        assert seed and call(*given, "--seed", seed[1]).out == done.out and call(*given, "--seed", seed[1]).err == ""
    as_json = call(*given, "--json")
    again = call(*given, "--json", "--seed", json.loads(as_json.out)["seed"])
    assert as_json.out == again.out and as_json.err == "", "the object has the seed"
    assert call(*given, "--strategy", "greedy").err == "", "nothing is drawn"
    type_in("Anna\n/show\n")
    talk = call("generate", "--model", model_folder, "--interactive", *SHORT)
    seed = re.search(r"--seed (\d+) repeats these answers", talk.err)
    assert seed and f"seed: {seed[1]}" in talk.out.splitlines()
    type_in("Anna\n/show\n")
    assert call("generate", "--model", model_folder, "--interactive", *SHORT, "--seed", seed[1]).out == talk.out


@pytest.mark.parametrize("more", [[], ["--engine", "llama.cpp"]])
def test_a_gguf_file_needs_llama_cpp(more: list[str], tmp_path: Path, call: Call) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    done = call("generate", "--model", tmp_path / "model.gguf", "--prompt", "a", *more, expect=2)
    assert 'llama.cpp is not installed: pip install "gptworks[llama]"' in done.err
    assert "--engine gptworks reads GGUF files" in done.err
