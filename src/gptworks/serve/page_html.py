"""The page as it is first sent: with its style and its words in it, so that the browser can paint it before it has
asked for anything else."""

import base64
import hashlib
import html
import json
import re

LANGUAGES = {"en": "en", "zh": "zh-CN"}  # in the order of words.js -> what the page calls itself
_LINK = re.compile(r'<link rel="stylesheet" href="/page/([a-z]+\.css)">')
_SCRIPT = re.compile(r'<script src="/page/([a-z]+\.js)"></script>')
_IMAGE = re.compile(r'<img src="/page/([a-z]+\.svg)" alt="">')
_SPEAKING = re.compile(r'(?P<tag><[^>]*\sdata-word="(?P<key>[^"]+)"[^>]*>)(?=</)')


def words_of(script: str) -> dict[str, list[str]]:
    """Key -> what words.js says in each language."""
    lines = re.findall(r'^  ("(?:[^"\\]|\\.)+"): (\[.*\]),$', script, re.MULTILINE)
    return {json.loads(key): json.loads(values) for key, values in lines}


def written(files: dict[str, bytes], language: str) -> bytes:
    """page.html in a language, with the files in it that hold up the first paint."""
    page = files["page.html"].decode()
    page = _LINK.sub(lambda match: f"<style>{files[match[1]].decode()}</style>", page)
    page = _SCRIPT.sub(lambda match: f"<script>{files[match[1]].decode()}</script>", page)
    page = _IMAGE.sub(lambda match: _drawn(files[match[1]].decode()), page)
    words, at = words_of(files["words.js"].decode()), list(LANGUAGES).index(language)
    page = _SPEAKING.sub(lambda match: match["tag"] + html.escape(words[match["key"]][at], quote=False), page)
    return page.replace('<html lang="en">', f'<html lang="{LANGUAGES[language]}">').encode()


def _drawn(image: str) -> str:
    return image.strip().replace("<svg ", '<svg aria-hidden="true" ', 1)


def policy(page: bytes) -> str:
    """Nothing from elsewhere, nothing inline but what stands in the page itself, known by its hash, and no text that
    becomes markup: `require-trusted-types-for` makes the browser refuse innerHTML itself."""
    text = page.decode()
    style, script = (_hashes(re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)) for tag in ("style", "script"))
    return (
        f"default-src 'none'; script-src 'self'{script}; style-src 'self'{style}; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )


def _hashes(inline: list[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in inline)
    return "".join(f" 'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def language_for(accepted: str) -> str:
    """By the first language that the browser accepts, as the page itself chooses it."""
    return "zh" if accepted.strip().lower().startswith("zh") else "en"
