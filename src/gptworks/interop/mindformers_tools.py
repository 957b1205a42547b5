"""The tools of MindFormers: rank tables, weights, and WikiText-2 to MindRecord."""

from collections.abc import Callable
from pathlib import Path

from gptworks.errors import DataError, UsageError
from gptworks.interop import command_line
from gptworks.interop.notes import Note
from gptworks.interop.settings import Key, Settings, parse_int, parse_str
from gptworks.interop.translation import Command, Translation

NAME = "mindformers"
KEYS = {
    "hccl_tools.py": [
        Key("--device_num", parse_str, default="[0,8)"),
        Key("--visible_devices", parse_str),
        Key("--server_ip", parse_str),
        Key(
            "--hccn_tool_path",
            parse_str,
            ignored_because="the addresses of devices are read from /etc/hccn.conf where it is there",
        ),
    ],
    "convert_weight.py": [
        Key("--layers", parse_int, default=12, same_effect="the file says how many it has"),
        Key("--torch_path", parse_str),
        Key("--mindspore_path", parse_str),
    ],
    "create_lm_data.py": [
        Key("--input_file", parse_str),
        Key("--output_file", parse_str),
        Key("--num_splits", parse_int, default=1),
        Key("--max_length", parse_int),
        Key("--vocab_file", parse_str),
        Key("--merge_file", parse_str),
    ],
    "wikitext2_data_process.py": [
        Key("--input_file", parse_str),
        Key("--output_file", parse_str),
        Key("--num_splits", parse_int, default=1),
        Key("--max_length", parse_int, default=1024),
        Key("--tokenizer_type", parse_str, default="gpt2"),
        Key("--data_columns", parse_str, ignored_because="the columns of GPT-2: input_ids, attention_mask, labels"),
    ],
}


def recognise(name: str, command: Command) -> bool:
    if name == "convert_weight.py":  # so are others called
        return any(word.partition("=")[0] == "--mindspore_path" for word in command.arguments)
    return name in KEYS or name == "merge_hccl.py"


def translate(command: Command) -> Translation:
    name = Path(command.program).name
    if name == "merge_hccl.py":
        return _merge(command)
    settings = Settings(name, KEYS[name], command_line.flags(command.arguments, ()))
    settings.map_plain()
    verb, arguments, remarks = _TOOLS[name](settings, command.folder)
    return settings.translated(NAME, verb, command.program, arguments=arguments, remarks=remarks)


def _option_words(settings: Settings, name: str, option: str, value: str) -> list[str]:
    """An option of ours, with the note."""
    settings.map(name, {option: value})
    del settings.ours[option]
    return [option, value] if option.startswith("--") else [value]


def _needed(settings: Settings, name: str) -> str:
    value = settings[name]
    if not value:
        raise UsageError(f"{settings.where}: {name} is missing. Needed: a file.")
    return str(value)


def _make_table(settings: Settings, _: Path) -> tuple[str, list[str], list[str]]:
    arguments = _option_words(settings, "--device_num", "--make-rank-table", str(settings["--device_num"]))
    visible = [text.strip() for text in str(settings["--visible_devices"] or "").split(",") if text.strip()]
    if visible and visible != [str(number) for number in range(len(visible))]:
        raise UsageError(
            f"--visible_devices: got {','.join(visible)}; needs 0,1,2 and so on. Put the range of devices into "
            "--device_num, such as [4,8]."
        )
    settings.ignore("--visible_devices", "these are the devices from 0 on, as --device_num counts them")
    if settings["--server_ip"]:
        arguments += _option_words(settings, "--server_ip", "--server-ip", str(settings["--server_ip"]))
    settings.ignore("--server_ip", "empty: the address by which others reach this machine")
    return "launch", arguments, []


def _merge(command: Command) -> Translation:
    """merge_hccl.py FILE FILE"""
    if len(command.arguments) < 2:
        raise UsageError(
            f"{command.program}: got {len(command.arguments)} files; needs the rank table of each machine."
        )
    arguments = ["--merge-rank-tables", *command.arguments]
    notes = [Note(file, "", "mapped", "--merge-rank-tables") for file in command.arguments]
    return Translation(NAME, "launch", command.program, arguments=arguments, notes=notes)


def _convert(settings: Settings, folder: Path) -> tuple[str, list[str], list[str]]:
    source = _needed(settings, "--torch_path")
    arguments = [
        *_option_words(settings, "--torch_path", "SOURCE", source),
        *_option_words(settings, "--mindspore_path", "DESTINATION", _needed(settings, "--mindspore_path")),
        *("--from", "hf", "--to", "mindspore"),
    ]
    remarks = [
        "the names are those MindFormers has had since July 2023; its own converter of the document's time wrote names "
        "that its model did not know"
    ]
    heads_known = False
    if (folder / source).exists():
        from gptworks.checkpoint.inspect import inspect

        report = inspect(folder / source, {}, name="hf")
        heads_known, layers = report.heads_known, report.opened.model.num_layers
        asked = settings["--layers"] if settings.is_given("--layers") else layers
        if asked > layers:
            raise UsageError(f"--layers: got {asked}, but {source} has {layers}. Leave it out, or give {layers}.")
        if asked < layers:
            remarks.append(
                f"--layers {asked}: theirs takes the first {asked} of {layers} layers; all are converted here"
            )
    if not heads_known:  # q, k and v go apart whole, so that any number writes the same bytes
        arguments += ["-o", "model.num_heads=1"]
        remarks.append(
            "a bare file does not say how many heads there are, nor does a .ckpt: 1 stands for any number here"
        )
    return "convert", arguments, remarks


_AS_ONE_TEXT = ["--format", "mindrecord", "--input-format", "text", "--doc-separator", ""]


def _rows(settings: Settings) -> list[str]:
    """The whole file encoded at once and cut into rows that share no token; the rest is dropped."""
    target = _needed(settings, "--output_file").removesuffix(".mindrecord")
    settings.ignore("--num_splits", "one file, as large as it gets" if settings["--num_splits"] > 1 else "one file")
    return [
        *_option_words(settings, "--input_file", "INPUT", _needed(settings, "--input_file")),
        *_option_words(settings, "--output_file", "--out", target),
        *_option_words(settings, "--max_length", "--row-length", str(settings["--max_length"])),
        *_AS_ONE_TEXT,
    ]


def _lines(settings: Settings, folder: Path) -> tuple[str, list[str], list[str]]:
    """create_lm_data.py of MindSpore's ModelZoo: GPT-2's tokenizer by its two files."""
    if not settings["--max_length"]:
        raise UsageError(
            f"{settings.where}: --max_length is missing. Needed: the seq_length of the model plus one, such as 1025."
        )
    remarks = [
        "their script makes a row of each line, cut off or filled up; here the lines are one text, cut into full rows"
    ]
    files = {name: str(settings[name] or "") for name in ("--vocab_file", "--merge_file")}
    is_here = [bool(file) and (folder / file).is_file() for file in files.values()]
    if any(is_here) or not all(files.values()):
        tokenizer = []
        for name in files:
            tokenizer += _option_words(settings, name, name.replace("_", "-"), _needed(settings, name))
    else:
        remarks.append(f"{' and '.join(files.values())} are not here: GPT-2's own, which ship with gptworks, are used.")
        settings.map(list(files), {"--tokenizer": "gpt2"})
        del settings.ours["--tokenizer"]
        tokenizer = ["--tokenizer", "gpt2"]
    return "prepare", [*_rows(settings), *tokenizer], remarks


def _prepare(settings: Settings, _: Path) -> tuple[str, list[str], list[str]]:
    arguments = [
        *_rows(settings),
        *_option_words(settings, "--tokenizer_type", "--tokenizer", str(settings["--tokenizer_type"])),
    ]
    remarks = [
        "their script takes out the blanks of WikiText's own tokens (` @-@ `, ` , `) first; here the text is as it is"
    ]
    if not settings.is_given("--max_length"):
        remarks.append(
            f"--max_length is not given: rows of {settings['--max_length']} tokens, which is for evaluation. To train "
            f"with seq_length {settings['--max_length']}, give --max_length {settings['--max_length'] + 1}."
        )
    return "prepare", arguments, remarks


_TOOLS: dict[str, Callable[[Settings, Path], tuple[str, list[str], list[str]]]] = {
    "hccl_tools.py": _make_table,
    "convert_weight.py": _convert,
    "wikitext2_data_process.py": _prepare,
    "create_lm_data.py": _lines,
}


def row_length(path: Path) -> int:
    """Tokens of a row of the data; 0 where it is not cut into rows, or not there."""
    from gptworks.data.store import Store, locate_stores

    try:
        stores = [Store(located) for located in locate_stores(str(path))]
    except DataError:
        return 0
    rows = [int(store.contents.sizes[0]) for store in stores if store.contents.is_rows and len(store.contents.sizes)]
    return min(rows, default=0)


def has_no_ends(path: Path) -> bool:
    """Whether the data say of themselves that no text in them ends with a token for it."""
    from gptworks.data.store import Store, locate_stores

    try:
        stores = [Store(located) for located in locate_stores(str(path))]
    except DataError:
        return False
    return any(store.sidecar is not None and not store.sidecar.eod_appended for store in stores)
