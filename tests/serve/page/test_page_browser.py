"""The page in chromium, before a server with small models. Nothing may be complained about on its console."""

import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gptworks.serve import http_server
from gptworks.serve.served_model import named_sources
from gptworks.serve.service import Limits

pytestmark = pytest.mark.slow
PROMPT = "On Friday morning"
DONE = ".block .facts:not(:empty)"
UNDO = "[data-word=undo]:visible"
ROOMS = ["", "#mode=chat", "#mode=read", "#with=chat"]


@pytest.fixture
def served(base_folder: Path, chat_folder: Path, serving: Callable[..., Any]) -> Iterator[Any]:
    with serving({"base": base_folder, "chat": chat_folder}, max_batch=8) as found:
        yield found


def link(served: Any, **given: object) -> str:
    return f"{served.url}/#" + "&".join(f"{name}={quote(str(value))}" for name, value in given.items())


def run(page: Any, prompt: str | None = None) -> None:
    if prompt is not None:
        page.fill("#prompt", prompt)
    page.click("#run")
    page.wait_for_selector(
        "#status:has-text('Done'), #status:has-text('完成'), #status:has-text('failed')", state="attached"
    )


def texts(page: Any, selector: str = ".tokens") -> list[str]:
    return page.eval_on_selector_all(selector, "found => found.map(each => each.textContent)")


def ids(page: Any, pane: int = 0) -> list[int]:
    script = "(found, at) => found[at].view.ids"
    return page.eval_on_selector_all(".tokens", script, pane)


def written(served: Any, **body: Any) -> Any:
    return served.complete(**{"model": "base", "max_tokens": 20, "return_token_ids": True, **body})["choices"][0]


def asked_seeds(page: Any) -> list[int]:
    """Of all that is asked from now on."""
    found: list[int] = []

    def hear(request: Any) -> None:
        if request.method == "POST" and "seed" in request.post_data_json:
            found.append(request.post_data_json["seed"])

    page.on("request", hear)
    return found


def copied(page: Any, what: str) -> str:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    if not page.is_visible(".sheet"):
        page.click("#copies summary")
    page.evaluate("navigator.clipboard.writeText('')")
    page.click(f"[data-copy={what}]")
    page.wait_for_function("navigator.clipboard.readText()")
    return page.evaluate("navigator.clipboard.readText()")


# Writing


def test_a_text_is_that_of_the_api_and_its_tokens_are_shaded(served: Any, pages: Any) -> None:
    page = pages.open(link(served, prompt=PROMPT, max_tokens=20, seed=3, temperature=0.8))
    run(page)
    expected = written(served, prompt=PROMPT, seed=3, temperature=0.8, logprobs=0)
    prompt_ids = expected["prompt_token_ids"]
    assert ids(page) == [*prompt_ids, *expected["token_ids"]]
    borders = (0.5, 0.2, 0.05, 0.01, 0.001)
    shades = [sum(math.exp(each) < border for border in borders) for each in expected["logprobs"]["token_logprobs"]]
    found = page.eval_on_selector_all(".token:not(.prompt)", "all => all.map(each => each.className)")
    assert [int(re.search(r"shade-(\d)", name)[1]) for name in found] == shades
    assert page.locator(".token.prompt").count() == len(prompt_ids)
    assert page.locator(".token.prompt.unknown").count() == 1  # of the first nothing is known
    assert "20 tokens" in page.text_content(".facts") and "as long as asked" in page.text_content(".facts")


def test_a_text_that_nobody_limited_tells_why_it_ended(served: Any, pages: Any) -> None:
    page = pages.open(link(served, prompt=PROMPT, ignore_eos="true"))
    run(page)
    assert "the context is full" in page.text_content(".facts")
    page.click('.token[data-at="9"]')
    page.locator("#alternatives li button").first.click()
    page.wait_for_selector(UNDO)
    assert "the context is full" in page.text_content(".facts")
    page.select_option("#language", "zh")
    assert "上下文已满" in page.text_content(".facts")
    page = pages.open(link(served, mode="chat", model="chat", ignore_eos="true"))
    run(page, "Hello")
    assert "the context is full" in page.text_content(".facts")
    script = (
        "import('/page/requests.js').then(({ limitOf: of }) => [of({}, 201), of({}, 200), of({ max_tokens: 9 }, 9)])"
    )
    assert page.evaluate(script) == ["usual", "full", "length"]


def test_several_texts_and_the_best_of_several(served: Any, pages: Any) -> None:
    page = pages.open(link(served, prompt=PROMPT, max_tokens=8, seed=3, n=3))
    run(page)
    answer = served.complete(model="base", prompt=PROMPT, max_tokens=8, seed=3, n=3, echo=True)
    assert len(answer["choices"]) == page.locator(".block").count() == 3
    page = pages.open(link(served, prompt=PROMPT, max_tokens=8, seed=3, best_of=4))
    run(page)
    best = written(served, prompt=PROMPT, max_tokens=8, seed=3, best_of=4)
    assert ids(page)[-8:] == best["token_ids"]


def test_an_alternative_goes_on_from_there_and_back(served: Any, pages: Any) -> None:
    page = pages.open(link(served, prompt=PROMPT, max_tokens=12, seed=5))
    run(page)
    before, num_prompt = ids(page), page.locator(".token.prompt").count()
    at = num_prompt + 4
    page.hover(f'.token[data-at="{at}"]')
    rows = page.locator("#alternatives li button")
    assert rows.count() == 5 and "% likely" in page.text_content("#alternatives-score")
    shares = [float(text.strip("< %")) for text in texts(page, "#alternatives .share")]
    assert shares == sorted(shares, reverse=True)
    choice = next(n for n in range(5) if "same" not in (rows.nth(n).get_attribute("class") or ""))
    chosen = page.evaluate(
        "([at, n]) => document.querySelector('.tokens').view.tokens[at].alternatives[n].id", [at, choice]
    )
    seeds = asked_seeds(page)
    rows.nth(choice).click()
    page.wait_for_selector(UNDO)
    after = ids(page)
    assert after[: at + 1] == [*before[:at], chosen] and chosen != before[at]
    assert after[at + 1 :] == written(served, prompt=after[: at + 1], seed=seeds[0], max_tokens=12)["token_ids"]
    assert page.locator(".token.chosen").count() == 1
    page.click(UNDO)
    assert ids(page) == before


def test_a_branch_has_draws_of_its_own_and_the_same_each_time(served: Any, pages: Any) -> None:
    """With the seed of the text the draws of its beginning would come again: the branch would quote it."""
    found = []
    for _ in range(2):
        page = pages.open(link(served, prompt=PROMPT, max_tokens=12, seed=5, ignore_eos="true"))
        run(page)
        seeds, num_prompt = asked_seeds(page), page.locator(".token.prompt").count()
        for at in (num_prompt + 2, num_prompt + 5):
            page.click(f'.token[data-at="{at}"]')
            page.locator("#alternatives li button").first.click()
            page.wait_for_selector("#run:visible")
            page.wait_for_selector(UNDO)
            page.click(UNDO)
        found.append(seeds)
    assert found[0] == found[1]  # of a link that was shared
    assert len({5, *found[0]}) == 3 and all(0 <= seed < 2**31 for seed in found[0])


def test_tokens_are_reached_by_keys_alone(served: Any, pages: Any) -> None:
    page = pages.open(link(served, prompt=PROMPT, max_tokens=6, seed=5))
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(DONE)
    page.focus('.token[tabindex="0"]')
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft"):
        page.keyboard.press(key)
    last = len(ids(page)) - 1
    assert page.evaluate("document.activeElement.dataset.at") == str(last - 1)
    assert page.is_visible("#alternatives")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('#alternatives') !== null")
    page.keyboard.press("Escape")
    assert page.is_hidden("#alternatives") and page.evaluate("document.activeElement.dataset.at") == str(last - 1)
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(UNDO)


def test_stop_frees_the_place_and_keeps_what_was_written(
    served: Any, pages: Any, slow_steps: Callable[[float], None]
) -> None:
    slow_steps(0.05)
    page = pages.open(link(served, prompt="The", ignore_eos="true"))  # as long as there is room
    page.click("#run")
    page.wait_for_selector('.token[data-at="8"]')
    assert served.service.num_rows == 1
    page.click("#stop")
    page.wait_for_selector("text=stopped by you")
    count = len(ids(page))
    assert 8 < count < 90
    while served.service.num_rows:  # the server notices within a step
        time.sleep(0.01)
    assert len(ids(page)) == count and page.is_visible("#run")


def test_text_of_a_model_is_never_markup(served: Any, pages: Any) -> None:
    evil = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\"><b>bold</b>"
    page = pages.open(link(served, mode="read", prompt=evil))
    run(page)
    assert texts(page) == [evil]
    page.click("text=Complete")
    page.fill("#set-max_tokens", "4")
    run(page)
    page.click("#show-history")
    page.wait_for_selector("#history li")
    assert evil[:40] in page.text_content("#history-list")
    assert page.locator("main b, main img, main script, dialog img, dialog script").count() == 0
    assert "owned" not in page.title()


def test_markup_cannot_be_made_even_by_mistake(served: Any, pages: Any) -> None:
    page = pages.open(served.url)
    refused = page.evaluate("() => { try { document.body.innerHTML = '<b>'; return '' } catch (e) { return e.name } }")
    assert refused == "TypeError"
    assert any("TrustedHTML" in text for text in pages.complaints)
    pages.complaints.clear()


# Reading


def test_the_perplexity_of_a_text_is_that_of_transformers(
    served: Any, pages: Any, base_folder: Path, small_tokenizer: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    text = "The old man walked slowly down to the harbour.\nA café was open. 你好"
    page = pages.open(link(served, mode="read", prompt=text))
    run(page)
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    with torch.no_grad():
        tokens = torch.tensor([ids(page)])
        known = model(tokens).logits[
            0, :-1, : small_tokenizer.vocab_size
        ]  # the model has more rows than the vocabulary
        loss = torch.nn.functional.cross_entropy(known, tokens[0, 1:]).item()
    shown = float(page.get_attribute(".facts", "data-perplexity"))
    assert shown == pytest.approx(math.exp(loss), rel=1e-4)
    assert "bits per byte" in page.text_content(".facts")
    # A character of several tokens is whole with the last of them; the others are marked.
    shown_text = page.eval_on_selector_all(".token:not(.part)", "all => all.map(each => each.textContent).join('')")
    assert shown_text == text


# A conversation


def test_a_conversation(served: Any, pages: Any) -> None:
    page = pages.open(link(served, mode="chat", model="chat", max_tokens=8, seed=2, system="Be kind."))
    run(page, "Hello there")
    first = texts(page)[0]
    page.fill("#prompt", "Why?")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".block:nth-of-type(2) .facts:not(:empty)")
    page.wait_for_selector("#run:visible")
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello there"}]
    body: dict[str, Any] = {"model": "chat", "max_tokens": 8, "seed": 2, "return_token_ids": True}
    status, one, _ = served.ask("/v1/chat/completions", {**body, "messages": messages})
    assert status == 200 and ids(page, 0) == one["choices"][0]["token_ids"]
    reply = one["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Why?"}]
    _, two, _ = served.ask("/v1/chat/completions", {**body, "messages": messages})
    assert ids(page, 1) == two["choices"][0]["token_ids"]
    assert texts(page, ".user") == ["Hello there", "Why?"] and first
    # An alternative in a reply goes on within the template.
    seeds = asked_seeds(page)
    page.click('.block:last-of-type .token[data-at="3"]')
    page.locator("#alternatives li button:not(.same)").first.click()
    page.wait_for_selector(UNDO)
    prefix = served.ask("/tokenize", {"model": "chat", "messages": messages})[1]["tokens"]
    after = ids(page, 1)
    goes_on = written(served, model="chat", prompt=[*prefix, *after[:4]], max_tokens=8, seed=seeds[0])
    assert seeds[0] != 2 and after[4:] == goes_on["token_ids"]
    page.click("text=New conversation")
    assert page.locator(".user").count() == 0


def test_a_base_model_says_that_it_does_not_chat(served: Any, pages: Any) -> None:
    page = pages.open(link(served, mode="chat", model="base"))
    assert "base is a base model" in page.text_content("#about")
    run(page, "Hello")
    assert "Use /v1/completions" in page.text_content(".trouble")
    pages.expect_refusals()


def test_history_is_kept_in_the_browser_and_brings_back(served: Any, pages: Any) -> None:
    page = pages.open(link(served, prompt=PROMPT, max_tokens=6, seed=9))
    run(page)
    whole = texts(page)[0]
    run(page, "Another one")
    page.reload()
    page.wait_for_selector("#run:enabled")
    page.click("#show-history")
    assert page.locator("#history li").count() == 2
    page.click(f".entry:has-text('{PROMPT}')")
    assert page.input_value("#prompt") == PROMPT and page.input_value("#set-seed") == "9"
    assert texts(page) == [whole]
    page.click("#show-history")
    page.click("#history-clear")
    assert page.is_visible("#history-empty") and page.evaluate("localStorage.getItem('gptworks.history')") is None


# Links and copies


def test_a_link_brings_back_the_very_text(served: Any, pages: Any) -> None:
    page = pages.open(served.url)
    page.fill("#set-temperature", "1.3")
    page.fill("#set-max_tokens", "15")
    page.click("text=Which tokens are left")
    page.fill("#set-top_k", "40")
    run(page, PROMPT)  # with a seed that was drawn
    other = pages.open(copied(page, "link"))
    assert other.input_value("#set-temperature") == "1.3" and other.input_value("#set-top_k") == "40"
    assert other.input_value("#prompt") == PROMPT
    run(other)
    assert ids(other) == ids(page)


def test_a_link_with_nonsense_is_read_as_far_as_it_makes_sense(served: Any, pages: Any) -> None:
    page = pages.open(link(served, mode="fly", model="gone", temperature="hot", top_p=7, seed=-1, max_tokens=5))
    assert "gone is not served here" in page.text_content("#notice")
    assert page.input_value("#set-temperature") == page.input_value("#set-top_p") == page.input_value("#set-seed") == ""
    assert page.input_value("#set-max_tokens") == "5"
    run(page, PROMPT)
    assert len(ids(page)) > 5


def test_a_link_has_the_seed_that_the_form_says(served: Any, pages: Any) -> None:
    page = pages.open(link(served, prompt=PROMPT, max_tokens=6, seed=4))
    run(page)
    page.fill("#set-seed", "77")
    assert "seed=77" in copied(page, "link") and "seed=77" in page.url
    page.fill("#set-seed", "")
    assert "seed=4&" in copied(page, "link")  # of the text that is shown
    seeds = asked_seeds(page)
    run(page)
    assert f"seed={seeds[0]}&" in copied(page, "link")


def test_a_seed_that_was_drawn_stays_drawn(served: Any, pages: Any) -> None:
    """Not so in the field, where it would make every further text the same."""
    page = pages.open(link(served, prompt=PROMPT, max_tokens=6))
    seeds = asked_seeds(page)
    run(page)
    assert "seed" not in page.url
    page.reload()
    page.wait_for_selector("#run:enabled")
    assert page.input_value("#prompt") == PROMPT and page.input_value("#set-seed") == ""
    page.click("#show-history")
    page.click(".entry")
    assert page.input_value("#set-seed") == "" and "seed" not in page.url
    assert f"seed={seeds[0]}&" in copied(page, "link")  # of the text that is shown again
    run(page)
    assert seeds[0] != seeds[1]


def test_what_is_only_read_has_no_seed(served: Any, pages: Any) -> None:
    page = pages.open(link(served, mode="read", prompt=PROMPT))
    run(page)
    assert "seed" not in page.url and "seed" not in copied(page, "link")
    page.reload()
    page.wait_for_selector("#run:enabled")
    page.click("#show-history")
    page.click(".entry")
    page.click("text=Complete")
    assert page.input_value("#set-seed") == "" and "seed" not in copied(page, "link")


def test_copies_give_the_text_of_the_page(
    served: Any, pages: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import shlex
    import subprocess
    import sys

    from gptworks.cli.main import main

    page = pages.open(link(served, prompt='It\'s "Friday" $HOME', max_tokens=9, seed=4, temperature=0.7, top_k=30))
    run(page)
    expected = written(served, prompt='It\'s "Friday" $HOME', max_tokens=9, seed=4, temperature=0.7, top_k=30)["text"]
    command = shlex.split(copied(page, "command"))
    assert command[:2] == ["gptworks", "generate"]
    assert main(command[1:]) == 0
    assert expected in capsys.readouterr().out
    curl = shlex.split(copied(page, "curl"))
    assert curl[0] == "curl" and curl[1] == f"{served.url}/v1/completions"
    status, answer, _ = served.ask("/v1/completions", json.loads(curl[curl.index("-d") + 1]))
    assert status == 200 and answer["choices"][0]["text"] == expected
    script = tmp_path / "copied.py"
    script.write_text(copied(page, "python"), encoding="utf-8")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert result.stdout == expected + "\n"
    assert copied(page, "link").startswith(f"{served.url}/#mode=complete")


# Two models


def test_two_models_answer_the_same_prompt_with_the_same_seed(served: Any, pages: Any) -> None:
    page = pages.open(link(served, prompt=PROMPT, max_tokens=10))
    page.click("text=Compare two models")
    assert page.locator(".pane:visible").count() == 2
    seeds = asked_seeds(page)
    run(page)
    page.wait_for_selector(f"{DONE} >> nth=1")
    (seed,) = set(seeds)
    for side, name in enumerate(("base", "chat")):
        expected = written(served, model=name, prompt=PROMPT, max_tokens=10, seed=seed)
        assert ids(page, side) == [*expected["prompt_token_ids"], *expected["token_ids"]]
    page.click("text=Read a text")
    run(page)
    page.wait_for_selector("#verdict:not(:empty)")
    nats = [
        sum(value for value in served.complete(
            model=name, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0
        )["choices"][0]["logprobs"]["token_logprobs"] if value is not None)
        for name in ("base", "chat")
    ]  # fmt: skip
    better, gap = ("chat", nats[1] - nats[0]) if nats[1] > nats[0] else ("base", nats[0] - nats[1])
    verdict = page.text_content("#verdict")
    assert verdict.startswith(f"{better} expects this text more")
    assert float(re.search(r": ([\d.]+) nats", verdict)[1]) == pytest.approx(gap, rel=0.01)
    page.check("#difference")
    assert page.locator(".by-difference").count() == 1


def test_who_has_one_model_is_told_how_to_compare_two_checkpoints(
    trained_run: Path, serving: Callable[..., Any], pages: Any
) -> None:
    with serving({"tiny": trained_run}, max_batch=2) as served:
        page = pages.open(served.url)
        page.wait_for_selector(".card .run")
        page.click("text=Compare two models")
        command = page.text_content("#compare-command").split()
        pages.close()
    assert command[:2] == ["gptworks", "serve"]
    sources = named_sources([command[at + 1] for at, word in enumerate(command) if word == "--model"])
    assert list(sources) == ["tiny@2", "tiny@4"]
    with serving(sources, max_batch=2) as served:
        page = pages.open(served.url)
        page.click("text=Compare two models")
        run(page, "The")
        page.wait_for_selector(f"{DONE} >> nth=1")
        assert texts(page, ".pane h2") == ["tiny@2", "tiny@4"]
        assert texts(page, ".pane > header .soft") == ["step 2", "step 4"]
        pages.close()


@pytest.mark.parametrize("noticed", ["by the card", "by what is asked", "by the button"])
def test_a_page_that_is_open_takes_the_models_of_the_next_server(
    trained_run: Path, serving: Callable[..., Any], pages: Any, monkeypatch: pytest.MonkeyPatch, noticed: str
) -> None:
    with serving({"tiny": trained_run}, max_batch=2) as served:
        page = pages.open(link(served, model="tiny", prompt="The", max_tokens=4))
        page.wait_for_selector(".card .run")
        if noticed != "by the card":
            page.click("#card-box > summary")  # closed, it does not ask
        page.click("text=Compare two models")
        command = page.text_content("#compare-command").split()
        port = int(served.url.rpartition(":")[2])
    assert command[command.index("--port") + 1] == str(port)
    sources = named_sources([command[at + 1] for at, word in enumerate(command) if word == "--model"])
    if noticed == "by the button":  # the one that was there is still there
        sources = {"tiny": str(trained_run), **sources}
    bind = http_server.bind
    monkeypatch.setattr(http_server, "bind", lambda host, _: bind(host, port))
    with serving(sources, max_batch=2):
        if noticed == "by what is asked":
            page.click("#run")
        elif noticed == "by the button":
            page.click("text=Compare two models")
        page.wait_for_selector("#model-0 option[value='tiny@4']", state="attached")
        page.wait_for_selector("#compare-help", state="hidden")
        if noticed != "by the button":
            assert "tiny is not served here; tiny@2 is shown instead" in page.text_content("#notice")
            page.click("text=Compare two models")
        page.wait_for_selector("#model-1:visible")
        assert page.input_value("#prompt") == "The"
        run(page)
        page.wait_for_selector(f"{DONE} >> nth=1")
        assert texts(page, ".pane h2") == list(sources)[:2]
        pages.close()
    pages.complaints = [text for text in pages.complaints if not text.startswith("Failed to load resource")]


# The card


def test_the_card_follows_a_run_that_trains(
    trained_run: Path, serving: Callable[..., Any], pages: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(trained_run, folder)
    with serving({"tiny": folder}, max_batch=1) as served:
        page = pages.open(served.url)
        page.wait_for_selector(".card .chart")
        assert "step 4 of 4" in page.text_content(".card .run") and "Newest checkpoint: step 4" in page.text_content(
            ".card"
        )
        page.click("text=Files of weights")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "loss": 4.25}) + "\n")
        page.wait_for_selector(".card .run:has-text('step 5 of 4')", timeout=30_000)
        assert page.locator(".card details[open]").count() == 1  # what the reader has opened stays open
        pages.close()


def test_cards_beside_each_other_tell_of_their_own_steps(
    trained_run: Path, serving: Callable[..., Any], pages: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(trained_run, folder)
    lines = [{"step": 2, "loss": 6.25}, {"step": 2, "held_out_loss": 5.5}, {"step": 4, "loss": 3.25}]
    lines += [{"step": 4, "held_out_loss": 3.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving({"two": f"{folder}@2", "four": f"{folder}@4"}, max_batch=1) as served:
        page = pages.open(f"{served.url}/#model=two&with=four")
        page.wait_for_selector(".card .run >> nth=1")
        two, four = (page.locator(".card .run").nth(at).inner_text() for at in (0, 1))
        pages.close()
    assert "Served here: step 2 · loss 6.25 · held-out 5.5\n" in two
    assert "Newest: step 4 of 4 · loss 3.25 · held-out 3.5\n" in two
    assert "Served here: step 4 of 4 · loss 3.25 · held-out 3.5\n" in four and "6.25" not in four


# What goes wrong


def test_a_full_queue_can_be_tried_again(
    base_folder: Path, serving: Callable[..., Any], pages: Any, slow_steps: Callable[[float], None]
) -> None:
    slow_steps(0.05)
    with serving({"base": base_folder}, limits=Limits(max_queue=0), max_batch=1) as served:
        page = pages.open(link(served, prompt=PROMPT, max_tokens=3))
        body = {"model": "base", "prompt": "The", "max_tokens": 60, "ignore_eos": True}
        other = threading.Thread(target=served.complete, kwargs=body)
        other.start()
        while not served.service.num_rows:
            time.sleep(0.01)
        run(page)
        assert "The queue is full" in page.text_content(".trouble")
        other.join()
        page.click("button:has-text('Try again')")
        page.wait_for_selector(DONE)
        assert page.is_hidden(".trouble")
        pages.expect_refusals()


def test_a_text_that_is_too_long_says_so(served: Any, pages: Any) -> None:
    page = pages.open(link(served, max_tokens=3))
    page.fill("#prompt", "word " * 300)
    page.wait_for_selector("#length.bad")
    run(page)
    said = page.text_content(".trouble")
    assert "The context of base is 96 tokens" in said and "Shorten the text" in said
    pages.expect_refusals()


def test_a_bad_setting_is_shown_where_it_stands(served: Any, pages: Any) -> None:
    page = pages.open(link(served, prompt=PROMPT))
    page.click("text=Against repetition")
    page.fill("#set-presence_penalty", "9")
    page.click("text=Against repetition")  # closed again
    page.click("#run")
    assert page.is_visible("#set-presence_penalty") and page.locator(".block").count() == 0
    assert page.evaluate("document.activeElement.id") == "set-presence_penalty"


def test_a_server_that_has_gone(base_folder: Path, serving: Callable[..., Any], pages: Any) -> None:
    with serving({"base": base_folder}, max_batch=1) as served:
        page = pages.open(link(served, prompt=PROMPT, max_tokens=3))
    run(page)
    assert "The server does not answer" in page.text_content(".trouble")
    assert page.is_visible("button:has-text('Try again')") and page.input_value("#prompt") == PROMPT
    pages.expect_refusals()


def test_the_key_is_asked_for_and_kept_for_the_session_only(
    base_folder: Path, serving: Callable[..., Any], pages: Any
) -> None:
    with serving({"base": base_folder}, max_batch=1, keys=[b"a-key-of-sixteen-letters"]) as served:
        page = pages.open(served.url)
        page.fill("#key-field", "not-the-key")
        page.click("text=Use it")
        page.wait_for_selector("#key-wrong:visible")
        page.fill("#key-field", "a-key-of-sixteen-letters")
        page.click("text=Use it")
        page.wait_for_selector("#run:enabled")
        run(page, PROMPT)
        assert page.locator(".block").count() == 1
        kept = page.evaluate("[JSON.stringify({...localStorage}), JSON.stringify({...sessionStorage}), location.href]")
        assert ["sixteen" in each for each in kept] == [False, True, False]
        pages.expect_refusals()


# Languages, themes, widths, everybody


def test_both_languages(served: Any, pages: Any) -> None:
    page = pages.open(link(served, prompt=PROMPT, max_tokens=5), locale="zh-CN")
    assert page.get_attribute("html", "lang") == "zh-CN" and page.text_content("#run") == "续写"
    run(page)
    assert "5 个词元" in page.text_content(".facts")
    chinese = page.inner_text("body")
    page.select_option("#language", "en")
    assert page.get_attribute("html", "lang") == "en" and page.text_content("#run") == "Write"
    assert "5 tokens" in page.text_content(".facts")
    names = "English|中文"  # of the languages, which stand in both
    assert not re.search(r"[\u4e00-\u9fff]", re.sub(names, "", page.inner_text("body")))
    unsaid = [word for word in ("Settings", "tokens/s", "Copy text", "Parameters", "likely") if word in chinese]
    assert unsaid == []
    page.reload()
    assert page.get_attribute("html", "lang") == "en"  # what was chosen is kept


@pytest.mark.parametrize("system", ["light", "dark"])
def test_both_themes(served: Any, pages: Any, system: str) -> None:
    page = pages.open(served.url, color_scheme=system)

    def is_dark() -> bool:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)) < 300

    assert is_dark() == (system == "dark")
    other = "light" if system == "dark" else "dark"
    page.select_option("#theme", other)
    assert is_dark() == (other == "dark")
    page.reload()
    assert is_dark() == (other == "dark")


def test_the_first_paint_needs_nothing_but_the_page(served: Any, browser: Any) -> None:
    """Its style, its words and the theme that was chosen are there before anything else has come."""
    context = browser.new_context(locale="zh-CN", color_scheme="light")
    page = context.new_page()
    page.goto(served.url)
    page.select_option("#theme", "dark")
    page.route("**/page/**", lambda route: route.abort())
    page.goto(f"{served.url}/?again")
    assert page.get_attribute("html", "lang") == "zh-CN" and page.get_attribute("html", "data-theme") == "dark"
    assert page.inner_text("#compare") == "比较两个模型" and page.inner_text("#run") == "续写"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert page.evaluate("performance.getEntriesByType('paint').length") == 2
    page.unroute("**/page/**")
    page.goto(f"{served.url}/?once-more")
    page.wait_for_selector("#run:enabled")
    drawn = page.evaluate("document.querySelector('h1 svg').getBoundingClientRect().width")
    assert drawn == 26 and page.locator("img").count() == 0
    times = "kind => performance.getEntriesByType(kind).filter(each => !each.name.endsWith('.svg'))"
    times += ".map(each => each.startTime)"
    assert min(page.evaluate(times, "resource")) >= min(300, *page.evaluate(times, "paint"))
    context.close()


def test_a_page_that_is_opened_unseen_is_there_when_it_is_looked_at(served: Any, browser: Any) -> None:
    context = browser.new_context()
    context.add_init_script("Object.defineProperty(document, 'hidden', {value: true}); PerformanceObserver = undefined")
    page = context.new_page()
    page.goto(served.url)
    page.wait_for_selector("#run:enabled")
    context.close()


def test_tokens_that_come_all_at_once_are_no_faster(
    served: Any, pages: Any, slow_steps: Callable[[float], None]
) -> None:
    slow_steps(0.02)
    page = pages.open(f"{served.url}/#max_tokens=20&ignore_eos=true")
    page.route("**/v1/completions", lambda route: route.fulfill(response=route.fetch()))
    run(page, "The")
    page.wait_for_selector(DONE)
    found = re.search(r"([\d.,]+) tokens/s", page.text_content(".facts"))
    assert found and float(found[1].replace(",", "")) <= 50  # a step of 20 ms each


def test_the_name_of_a_model_is_read_on_a_phone(served: Any, pages: Any) -> None:
    page = pages.open(f"{served.url}/", viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    assert page.evaluate("document.getElementById('model-0').getBoundingClientRect().width") >= 150


@pytest.mark.parametrize("room", ROOMS)
def test_a_phone_needs_no_scrolling_sideways(served: Any, pages: Any, room: str) -> None:
    page = pages.open(
        f"{served.url}/{room}", viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True, locale="zh-CN"
    )
    page.fill("#set-max_tokens", "20") if room != "#mode=read" else None
    if room == "#mode=chat":
        page.select_option("#model-0", "chat")
    run(page, "W" * 30 + " https://example.org/" + "a" * 20)
    page.wait_for_selector(DONE)
    page.tap(".token >> nth=3")
    assert page.is_visible("#alternatives")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("room", ROOMS)
def test_axe_finds_nothing(served: Any, pages: Any, axe: Callable[[Any], list[str]], room: str, scheme: str) -> None:
    page = pages.open(f"{served.url}/{room}", color_scheme=scheme)
    if room == "#mode=chat":
        page.select_option("#model-0", "chat")
    page.wait_for_selector(".card dl")
    assert axe(page) == []
    for summary in page.locator("aside summary").all():
        if not summary.evaluate("each => each.parentElement.open") and summary.is_visible():
            summary.click()
    run(page, "The man\n    and a café\x0b\u200b\u3000")
    page.wait_for_selector(DONE)
    page.click('.token[data-at="2"]')
    assert axe(page) == []


def test_axe_finds_nothing_in_the_windows(
    served: Any, pages: Any, axe: Callable[[Any], list[str]], base_folder: Path, serving: Callable[..., Any]
) -> None:
    page = pages.open(link(served, prompt="word " * 300))
    run(page)
    assert page.is_visible(".trouble") and axe(page) == []
    run(page, PROMPT)
    page.click("#show-history")
    assert axe(page) == []
    with serving({"base": base_folder}, max_batch=1, keys=[b"a-key-of-sixteen-letters"]) as guarded:
        assert axe(pages.open(guarded.url)) == []
    with serving({"base": base_folder}, max_batch=1) as alone:
        page = pages.open(alone.url)
        page.click("text=Compare two models")
        assert page.is_visible("#compare-help") and axe(page) == []
    pages.expect_refusals()
