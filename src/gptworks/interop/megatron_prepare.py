"""Megatron's tools/preprocess_data.py, which OneFlow's document uses too."""

from pathlib import Path

from gptworks.errors import ConfigError
from gptworks.interop.megatron_flags import on_command_line
from gptworks.interop.settings import Key, Settings, parse_int, parse_str
from gptworks.interop.translation import Command, Translation

KEYS = [
    Key("--input", parse_str),
    Key("--output-prefix", parse_str),
    Key("--vocab", parse_str),
    Key("--vocab-file", parse_str),
    Key("--merge-file", parse_str),
    Key("--dataset-impl", parse_str, default="mmap"),
    Key("--tokenizer-type", parse_str),
    Key("--tokenizer-model", parse_str),
    Key("--append-eod", parse_str, switch=True),
    Key("--json-key", parse_str),
    Key("--json-keys", parse_str, default="text"),
    Key("--workers", parse_int, default=1),
    Key("--partitions", parse_int, default=1, same_effect="the work is cut by itself, and the result is one store"),
    Key("--log-interval", parse_int, ignored_because="progress is shown in a bar, or every 10 seconds"),
    Key("--split-sentences", parse_str, switch=True),
    Key("--keep-newlines", parse_str, switch=True, same_effect="newlines are always kept"),
    Key("--keep-sequential-samples", parse_str, switch=True, same_effect="the order of the input is always kept"),
    Key("--lang", parse_str, ignored_because="sentences are not split"),
    Key("--vocab-size", parse_int, ignored_because="the tokenizer's files say it"),
]
FORMATS = {"mmap": "megatron", "cached": "tnt", "lazy": "tnt"}
# The files their documents let one download, which ship with gptworks.
_PUBLISHED = {"gpt2-vocab.json", "vocab.json", "gpt2-merges.txt", "merges.txt"}


def translate(command: Command, system: str) -> Translation:
    settings = Settings.of_command(command, KEYS, several=("--json-keys", "--json-key"))
    needed = [name for name in ("--input", "--output-prefix") if not settings[name]]
    if needed:
        raise ConfigError(command.program, [f"{name}: is required." for name in needed])
    if settings.is_given("--split-sentences"):
        raise ConfigError(
            command.program, ["--split-sentences: GPT is trained on documents, and so is all here. Leave it out."]
        )
    keys = str(settings["--json-key"] or settings["--json-keys"]).split()
    kind = settings["--dataset-impl"]
    if kind not in FORMATS:
        raise ConfigError(command.program, [f"--dataset-impl: got {kind!r}; needs {', '.join(FORMATS)}."])
    prefix = str(settings["--output-prefix"])
    # `prepare` itself puts the key behind the name where there are several.
    out = f"{prefix}_{keys[0]}_document" if len(keys) == 1 else prefix
    arguments = [settings["--input"], "--out", out, "--format", FORMATS[kind], "--workers", str(settings["--workers"])]
    for key in keys:
        arguments += ["--key", key]
    remarks = _names(keys, prefix)
    on_command_line(settings, "--input", {"INPUT": settings["--input"]})
    on_command_line(settings, "--output-prefix", {"--out": out})
    on_command_line(settings, ["--json-key", "--json-keys"], {"--key": " ".join(keys)})
    on_command_line(settings, "--dataset-impl", {"--format": FORMATS[kind]})
    on_command_line(settings, "--workers", {"--workers": settings["--workers"]})
    if settings.is_given("--append-eod"):
        arguments.append("--append-eod")
        on_command_line(settings, "--append-eod", {"--append-eod": True})
    arguments += _tokenizer(settings, command.folder, remarks)
    settings.map_plain()
    return settings.translated(system, "prepare", command.program, arguments=arguments, remarks=remarks)


def _names(keys: list[str], prefix: str) -> list[str]:
    if len(keys) == 1:
        return []
    theirs = ", ".join(f"{prefix}_{key}_document" for key in keys)
    return [f"several keys: the stores are called {prefix}_KEY; theirs would be {theirs}."]


def _tokenizer(settings: Settings, folder: Path, remarks: list[str]) -> list[str]:
    kind = settings["--tokenizer-type"] or "GPT2BPETokenizer"
    model = settings["--tokenizer-model"]
    if kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer") and model:
        on_command_line(settings, ["--tokenizer-type", "--tokenizer-model"], {"--tokenizer": model})
        for name in ("--vocab", "--vocab-file", "--merge-file"):
            settings.ignore(name, "--tokenizer-model is the tokenizer")
        return ["--tokenizer", model]
    if kind != "GPT2BPETokenizer":
        raise ConfigError(
            settings.where,
            [
                f"--tokenizer-type: got {kind!r}; GPT has GPT2BPETokenizer, or HuggingFaceTokenizer or "
                "SentencePieceTokenizer with --tokenizer-model."
            ],
        )
    settings.ignore("--tokenizer-model", "GPT2BPETokenizer has --vocab-file and --merge-file")
    files = {
        "--vocab-file": str(settings["--vocab"] or settings["--vocab-file"] or "gpt2-vocab.json"),
        "--merge-file": str(settings["--merge-file"] or "gpt2-merges.txt"),
    }
    absent = [name for name in files.values() if not (folder / name).is_file()]
    if len(absent) == 2 and all(Path(name).name in _PUBLISHED for name in absent):
        remarks.append(f"{' and '.join(absent)} are not here: GPT-2's own, which ship with gptworks, are used.")
        on_command_line(
            settings, ["--tokenizer-type", "--vocab", "--vocab-file", "--merge-file"], {"--tokenizer": "gpt2"}
        )
        return ["--tokenizer", "gpt2"]
    settings.same("--tokenizer-type", "byte-level BPE, by the two files")
    on_command_line(settings, ["--vocab", "--vocab-file"], {"--vocab-file": files["--vocab-file"]})
    on_command_line(settings, "--merge-file", {"--merge-file": files["--merge-file"]})
    return [word for option, file in files.items() for word in (option, file)]
