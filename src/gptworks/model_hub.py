"""Names of models, and the folders on this machine that they stand for.

Looked at in this order: a folder of that path, $GPTWORKS_HOME/models/NAME, the cache of the Hugging Face hub. Nothing
is downloaded unless that was allowed in so many words.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gptworks import file_errors, run_paths, tokenizer_files
from gptworks.errors import CheckpointError, first_line

HOME, DOWNLOAD = "GPTWORKS_HOME", "GPTWORKS_DOWNLOAD"
_HUB_OWNER = "openai-community"
_SIZES = {"gpt2": 548, "gpt2-medium": 1520, "gpt2-large": 3247, "gpt2-xl": 6432}  # MB of model.safetensors
# OpenAI's GPT-2 as the hub and MindFormers (gpt2), PaddleNLP (gpt2-en) and the hub in full call it.
GPT2_NAMES = {
    spelling: size for size in _SIZES for spelling in (size, f"{size}-en", f"{_HUB_OWNER}/{size}")
}  # name -> the short one
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # "name" or "owner/name"

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
_TOKENIZERS = (*tokenizer_files.VOCABULARIES, *tokenizer_files.SENTENCEPIECE)
_WANTED = ["config.json", "model*.safetensors", "model.safetensors.index.json", *_TOKENIZERS]
_WANTED += ["tokenizer_config.json", "merges.txt"]


def home() -> Path:
    """$GPTWORKS_HOME, or ~/.gptworks."""
    return Path(os.environ.get(HOME) or "~/.gptworks").expanduser()


def hub_cache() -> Path:
    """Where the Hugging Face hub's own library keeps what it has downloaded."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    general = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HF_HOME") or general / "huggingface").expanduser() / "hub"


def find(name: str) -> Path | None:
    """The folder with the weights of a name, if it is on this machine."""
    return _first(name, _has_weights)


def find_tokenizer(name: str) -> Path | None:
    """The folder with the tokenizer of a name, if it is on this machine."""
    return _first(name, lambda folder: any((folder / file).is_file() for file in _TOKENIZERS))


def tokenizer_in_run(folder: Path) -> Path | None:
    """The folder with the tokenizer of a run, in its newest checkpoint, or of one checkpoint."""
    steps = sorted((folder / run_paths.CHECKPOINTS).glob("step-*"), reverse=True)
    inside = (step / part for step in [folder, *steps] for part in (run_paths.PORTABLE, run_paths.TOKENIZER))
    return next((each for each in inside if any((each / file).is_file() for file in _TOKENIZERS)), None)


def resolve(name: str, *, download: bool | None = None) -> Path:
    """The folder of a name. `download` None: as $GPTWORKS_DOWNLOAD says; unset means no."""
    path = find(name)
    if path is not None:
        return path
    if _HUB_NAME.fullmatch(name) and (may_download() if download is None else download):
        return _download(_hub_names(name)[0])
    file_errors.refuse_unreadable(Path(name))
    raise CheckpointError(_what_to_do(name))


def may_download() -> bool:
    value = os.environ.get(DOWNLOAD, "").strip().lower()
    if value in ("1", "true", "yes"):
        return True
    if value in ("", "0", "false", "no"):
        return False
    raise CheckpointError(f"{DOWNLOAD}: got {value!r}; needs 1 (models may be downloaded) or 0.")


def _first(name: str, is_it: Callable[[Path], bool]) -> Path | None:
    if not _HUB_NAME.fullmatch(name):  # a path, and no name that a cache could hold
        return None
    return next((folder for folder in _candidates(name) if is_it(folder)), None)


def _candidates(name: str) -> Iterator[Path]:
    size = GPT2_NAMES.get(name)
    for spelling in dict.fromkeys([name, *(known for known, its in GPT2_NAMES.items() if its == size)]):
        yield home() / "models" / spelling
    for hub_name in _hub_names(name):
        snapshot = _snapshot(hub_cache() / f"models--{hub_name.replace('/', '--')}")
        if snapshot is not None:
            yield snapshot


def _hub_names(name: str) -> list[str]:
    """The present name on the hub, and the one that older caches know it by."""
    if name in GPT2_NAMES:
        return [f"{_HUB_OWNER}/{GPT2_NAMES[name]}", GPT2_NAMES[name]]
    return [name]


def _snapshot(folder: Path) -> Path | None:
    """The files of the hub's main branch; of the only revision there is, where nothing says which that is."""
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        snapshots = sorted(path for path in (folder / "snapshots").glob("*") if path.is_dir())
        return snapshots[0] if len(snapshots) == 1 else None
    return folder / "snapshots" / Path(revision).name


def _has_weights(folder: Path) -> bool:
    """A Hugging Face folder, or a run of ours."""
    if (folder / "config.json").is_file():
        return any((folder / file).is_file() for file in _WEIGHTS)
    return run_paths.is_run(folder) or run_paths.is_checkpoint(folder)


def _download(hub_name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{hub_name}: downloading needs the package huggingface_hub, which is not installed. "
            'Install it: pip install "gptworks[hub]"'
        ) from None

    def fetch(patterns: list[str]) -> Path:
        settings: dict[str, Any] = {"cache_dir": hub_cache(), "allow_patterns": patterns}
        try:
            return Path(snapshot_download(hub_name, **settings))
        except Exception as error:  # no network, no such model, a gate, a full disk: in the words of three libraries
            reason = first_line(error)
            raise CheckpointError(
                f"{hub_name}: could not be downloaded ({reason}). Try again, or put its files into "
                f"{home() / 'models' / hub_name}."
            ) from None

    folder = fetch(_WANTED)
    if not _has_weights(folder):  # from before safetensors
        folder = fetch([*_WANTED, "pytorch_model.bin"])
    if not _has_weights(folder):
        raise CheckpointError(
            f"{hub_name}: downloaded to {folder}, but there is no config.json with model.safetensors or "
            "pytorch_model.bin in it. Needed: a GPT-2 model."
        )
    return folder


def _what_to_do(name: str) -> str:
    is_hub_name = _HUB_NAME.fullmatch(name) is not None
    if name not in GPT2_NAMES:
        elsewhere = f" It is not in {home() / 'models'} or {hub_cache()} either." if is_hub_name else ""
        if there := _alike(Path(name)):
            return f"{name}: no such file or folder. {there}"
        return (
            f"{name}: no such {'file' if Path(name).suffix else 'folder'}. Needed: a run folder of gptworks, a Hugging "
            "Face GPT-2 folder, weights of FleetX (the folder of model.pdparams), PaddleNLP, MindSpore (.ckpt), "
            f"OneFlow, Megatron or nanoGPT, or one of the names {', '.join(GPT2_NAMES)}.{elsewhere}"
        )
    size = GPT2_NAMES[name]
    return (
        f"{name}: these weights are not on this machine. Looked in ./{name}, {home() / 'models' / name} and the "
        f"Hugging Face cache {hub_cache()}. Needed: config.json and model.safetensors ({_SIZES[size]:,} MB) of "
        f"{_HUB_OWNER}/{size} on the Hugging Face hub. Put the two files into {home() / 'models' / name}, or have them "
        f'downloaded: pip install "gptworks[hub]", then --download or {DOWNLOAD}=1.'
    )


def _alike(path: Path) -> str:
    """What is there under a name that differs in a number or a letter, of the first part of a path that is missing."""
    missing = next((each for each in [*reversed(path.parents), path] if not each.exists()), path)
    if not missing.parent.is_dir() or missing == Path(path.name):
        return ""
    names = sorted(each.name for each in missing.parent.iterdir())
    same = [each for each in names if re.sub(r"\d+", "0", each) == re.sub(r"\d+", "0", missing.name)]
    near = same or difflib.get_close_matches(missing.name, names, 3, cutoff=0.7)
    near.sort(key=lambda each: [int(number) for number in re.findall(r"\d+", each)])
    return f"{missing.parent} has no {missing.name}; it has {', '.join(near[-3:])}." if near else ""
