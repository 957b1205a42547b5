"""The page without a browser: its files and headers, its words, the cards of models, what a step of a run is called."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.cli.main import main
from gptworks.errors import CheckpointError, UsageError
from gptworks.serve import page_html, page_routes
from gptworks.serve.schema import ChatRequest, CompletionRequest
from gptworks.serve.served_model import checkpoint_of, named_sources

FILES = {name: text.decode() for name, text in page_routes.files().items()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
MOST_BYTES = 150_000


def words() -> dict[str, list[str]]:
    return page_html.words_of(FILES["words.js"])


def test_the_page_is_small_and_needs_nothing_from_elsewhere() -> None:
    assert {"page.html", "page.css", "main.js", "icon.svg"} <= FILES.keys()
    assert sum(len(text.encode()) for text in FILES.values()) < MOST_BYTES
    for name, text in FILES.items():
        # The namespace of SVG is a name, and nothing is loaded from it.
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert len(text.splitlines()) <= 450, name


def test_nothing_is_inline_and_no_text_becomes_markup() -> None:
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", FILES["page.html"])
    for name, text in SCRIPTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )


def test_every_module_is_there() -> None:
    for name, text in SCRIPTS.items():
        assert set(re.findall(r'from "\./(\S+)"', text)) <= SCRIPTS.keys(), name


@pytest.mark.parametrize(("accepted", "language"), [("zh-CN,zh;q=0.9", "zh"), ("de-DE,de;q=0.9", "en"), ("", "en")])
def test_the_page_comes_with_its_style_and_its_words(
    base_folder: Path, serving: Callable[..., Any], accepted: str, language: str
) -> None:
    """Nothing that the first paint needs is asked for after the page."""
    with serving({"base": base_folder}, max_batch=1) as served:
        _, page, headers = served.ask("/", headers={"accept-language": accepted} if accepted else {})
    inline = dict(re.findall(r"<(style|script)>(.*?)</(?:style|script)>", page, re.DOTALL))
    assert inline == {"style": FILES["page.css"], "script": FILES["first.js"]}
    for kind, text in inline.items():  # by its hash only: whatever else is inline stays forbidden
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'self' 'sha256-{digest}';" in headers["content-security-policy"]
    assert not re.search(r'rel="(?:stylesheet|modulepreload)"|<script [^>]*src=|<img', page)
    at = ["en", "zh"].index(language)
    assert f'<html lang="{["en", "zh-CN"][at]}">' in page and headers["vary"] == "accept-language"
    for key, text in re.findall(r'data-word="([^"]+)"[^>]*>([^<]*)</', page):
        assert html.unescape(text) == words()[key][at]


def test_every_word_is_there_in_both_languages() -> None:
    known = words()
    assert len(known) > 150
    for key, (english, chinese) in known.items():
        assert english and chinese, key
        assert sorted(set(re.findall(r"\{\d\}", english))) == sorted(set(re.findall(r"\{\d\}", chinese))), key
    used = set(re.findall(r'data-(?:word|label|hint)="([^"]+)"', FILES["page.html"]))
    for text in SCRIPTS.values():
        used |= set(re.findall(r'\b(?:say|tell)\("([^"]+)"', text))
        used |= set(re.findall(r'\bspeak\([^,]+, "([^"]+)"', text))
        used |= set(re.findall(r'\bword: "([^"]+)"', text))
    assert len(used) > 70
    assert used <= known.keys()
    others = FILES["page.html"] + "".join(
        re.sub(r'^  ".*": \[.*$', "", text, flags=re.MULTILINE) for text in SCRIPTS.values()
    )
    families = ("set.", "about.", "group.", "theme.", "finish.", "mode.", "run.")  # their names are put together
    assert [key for key in known if f'"{key}"' not in others and not key.startswith(families)] == []


def test_who_looks_for_the_perplexity_of_a_text_is_told_where() -> None:
    for key in ("about.read", "text hint"):
        english, chinese = words()[key]
        assert "perplexity" in english and "困惑度" in chinese


def settings() -> list[str]:
    return re.findall(r'\{ name: "(\w+)", group', FILES["settings.js"])


def test_every_setting_of_the_api_is_on_the_page_and_explained() -> None:
    about_the_answer = {
        "model",
        "prompt",
        "messages",
        "echo",
        "logprobs",
        "stream",
        "stream_options",
        "return_token_ids",
    }
    for_clients = {"user", "metadata", "suffix"}
    assert set(settings()) == CompletionRequest.model_fields.keys() - about_the_answer - for_clients
    of_chats_only = {"max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice"}
    of_chats_only |= {"parallel_tool_calls", "store"}
    assert ChatRequest.model_fields.keys() - about_the_answer - for_clients - of_chats_only <= set(settings())
    for name in settings():
        assert {f"set.{name}", f"about.{name}"} <= words().keys()


def test_the_files_come_with_a_strict_policy(base_folder: Path, serving: Callable[..., Any]) -> None:
    with serving({"base": base_folder}, max_batch=1) as served:
        for name, text in FILES.items():
            path = "/" if name == "page.html" else f"/page/{name}"
            status, body, headers = served.ask(path)
            assert status == 200 and (body == text or path == "/")
            kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
            assert headers["content-type"] == f"{kind[name.rpartition('.')[2]]}; charset=utf-8"
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert "require-trusted-types-for 'script'" in policy and headers["x-content-type-options"] == "nosniff"
            status, body, _ = served.ask(path, headers={"if-none-match": headers["etag"]})
            assert status == 304 and body == ""
        for path in ("/page/", "/page/page.html", "/page/../guard.py", "/page/%2e%2e/guard.py", "/page/words.js/"):
            assert served.ask(path)[0] == 404


def test_without_the_page_there_is_the_api_alone(base_folder: Path, serving: Callable[..., Any]) -> None:
    with serving({"base": base_folder}, max_batch=1, has_page=False) as served:
        for path in ("/", "/page/main.js", "/card/base"):
            assert served.ask(path)[0] == 404
        assert served.ask("/v1/models")[0] == 200


def test_the_page_needs_no_key_and_all_it_asks_for_does(base_folder: Path, serving: Callable[..., Any]) -> None:
    with serving({"base": base_folder}, max_batch=1, keys=[b"a-key-of-sixteen-letters"]) as served:
        assert served.ask("/")[0] == served.ask("/page/main.js")[0] == 200
        assert served.ask("/card/base")[0] == served.ask("/v1/models")[0] == 401
        right = {"authorization": "Bearer a-key-of-sixteen-letters"}
        assert served.ask("/card/base", headers=right)[0] == 200


def test_a_card_of_a_folder_has_its_hashes(base_folder: Path, serving: Callable[..., Any]) -> None:
    with serving({"base": base_folder}, max_batch=1) as served:
        card: dict[str, Any] = {"files": None}
        while card["files"] is None:
            status, card, headers = served.ask("/card/base")
            assert status == 200 and headers["cache-control"] == "no-store"
    weights = base_folder / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert card["files"] == [{"name": weights.name, "bytes": weights.stat().st_size, "sha256": digest}]
    assert (card["system"], card["run"], card["layers"], card["context"]) == ("hf", None, 2, 96)


def test_a_card_of_a_run_grows_with_it(trained_run: Path, serving: Callable[..., Any], tmp_path: Path) -> None:
    import shutil

    run = tmp_path / "tiny"
    shutil.copytree(trained_run, run)
    with serving({"tiny@2": f"{run}@2"}, max_batch=1) as served:
        card = served.ask("/card/tiny@2")[1]
        assert card["step"] == 2 and card["run"]["newest"] == 4 and card["run"]["steps"] == 4
        assert [each["step"] for each in card["run"]["checkpoints"]] == [2, 4]
        assert [step for step, _ in card["run"]["loss"]] == [1, 2, 3, 4]
        manifest = json.loads((run / "checkpoints/step-00000002/manifest.json").read_text())
        (weights,) = card["files"]
        assert weights["sha256"] == manifest["files"]["portable/model.safetensors"]["sha256"]
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "loss": 4.25}) + "\n")
        assert served.ask("/card/tiny@2")[1]["run"]["loss"][-1] == [5, 4.25]


def test_a_card_has_the_losses_of_the_step_that_is_served(
    trained_run: Path, serving: Callable[..., Any], tmp_path: Path
) -> None:
    import shutil

    run = tmp_path / "tiny"
    shutil.copytree(trained_run, run)
    lines = [{"step": 1, "loss": 6.0}, {"step": 1, "held_out_loss": 5.5}, {"step": 3, "loss": 4.0}]
    lines += [{"step": 4, "loss": 3.0}, {"step": 4, "held_out_loss": 3.5}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving({"two": f"{run}@2", "four": f"{run}@4"}, max_batch=1) as served:
        two, four = (served.ask(f"/card/{name}")[1]["run"] for name in ("two", "four"))
    assert two["served"] == {"loss": [1, 6.0], "held_out": [1, 5.5]}  # the nearest before it
    assert four["served"] == two["last"] == four["last"] == {"loss": [4, 3.0], "held_out": [4, 3.5]}


def test_the_loss_of_a_served_step_is_smoothed_as_the_curve_is(
    trained_run: Path, serving: Callable[..., Any], tmp_path: Path
) -> None:
    import shutil

    run = tmp_path / "tiny"
    shutil.copytree(trained_run, run)
    lines = [{"step": step, "loss": 100.0 + step} for step in range(1, 41)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving({"four": f"{run}@4"}, max_batch=1) as served:
        facts = served.ask("/card/four")[1]["run"]
    assert facts["served"]["loss"] == [4, 103.0]  # of steps 2 to 4: nothing of what came later
    assert facts["last"]["loss"] == facts["smoothed"][-1]


def test_a_card_of_a_run_that_has_logged_nothing(
    trained_run: Path, serving: Callable[..., Any], tmp_path: Path
) -> None:
    import shutil

    run = tmp_path / "tiny"
    shutil.copytree(trained_run, run)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 4.0}) + "\n")
    with serving({"two": f"{run}@2"}, max_batch=1) as served:
        facts = served.ask("/card/two")[1]["run"]
    assert facts["served"] == {"loss": None, "held_out": None}
    assert facts["last"] == {"loss": [3, 4.0], "held_out": None}


def test_a_card_of_a_checkpoint_that_was_removed(
    trained_run: Path, serving: Callable[..., Any], tmp_path: Path
) -> None:
    import shutil

    run = tmp_path / "tiny"
    shutil.copytree(trained_run, run)
    with serving({"tiny": run}, max_batch=1) as served:
        shutil.rmtree(run / "checkpoints")
        status, card, _ = served.ask("/card/tiny")
        assert status == 200 and card["files"] == [] and card["run"] is None and card["layers"] == 1


@pytest.mark.parametrize("name", ["other", "../base", "..%2f..%2fetc%2fpasswd", "base/", "", "/etc/passwd"])
def test_cards_are_of_served_models_only(base_folder: Path, serving: Callable[..., Any], name: str) -> None:
    with serving({"base": base_folder}, max_batch=1) as served:
        status, answer, _ = served.ask(f"/card/{name}")
        assert status == 404 and "error" in answer


def test_alternatives_have_their_ids_when_ids_are_asked_for(base_folder: Path, serving: Callable[..., Any]) -> None:
    with serving({"base": base_folder}, max_batch=1) as served:
        body = {"model": "base", "prompt": "The", "max_tokens": 3, "logprobs": 4, "temperature": 0, "ignore_eos": True}
        found = served.complete(**body, return_token_ids=True)["choices"][0]
        assert "alternatives" not in served.complete(**body)["choices"][0]["logprobs"]
        first = [each[0]["id"] for each in found["logprobs"]["alternatives"]]
        assert first == found["token_ids"]  # greedy takes the likeliest
        for scores, named in zip(found["logprobs"]["alternatives"], found["logprobs"]["top_logprobs"], strict=True):
            assert {each["token"]: each["logprob"] for each in scores} == named and len(scores) == 4


# RUN@STEP


def test_a_step_of_a_run_has_a_name(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained_run / "checkpoints"
    assert checkpoint_of(f"{trained_run}@2") == checkpoint_of(f"{trained_run}@002") == folder / "step-00000002"
    assert checkpoint_of(f"{trained_run}@latest") == checkpoint_of(str(trained_run)) == folder / "step-00000004"
    assert named_sources([f"{trained_run}@2", f"last={trained_run}@4"]) == {
        "tiny@2": f"{trained_run}@2",
        "last": f"{trained_run}@4",
    }
    options = ["--prompt", "The", "--seed", "1", "--max-new-tokens", "30"]
    texts = []
    for name in (f"{trained_run}@2", str(folder / "step-00000002"), f"{trained_run}@4"):
        assert main(["generate", "--model", name, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("which", ["3", "best", "next", "", "9" * 100])
def test_a_step_that_is_not_there_is_told_with_those_that_are(trained_run: Path, which: str) -> None:
    with pytest.raises(CheckpointError, match=rf"no checkpoint {which[:40]} of .*tiny\. Steps: 2, 4"):
        checkpoint_of(f"{trained_run}@{which}")


def test_two_models_of_one_name_are_refused(trained_run: Path) -> None:
    with pytest.raises(UsageError, match="the name tiny@2 is taken"):
        named_sources([f"{trained_run}@2", f"{trained_run}@2"])
