"""Fills the generated parts of the pages in this folder. Run: python docs/from/make_tables.py

Between `<!-- commands: SYSTEM -->` and `<!-- end -->`: their commands and what `gptworks run` makes of them. Between
`<!-- keys: SYSTEM N -->` and `<!-- end -->`: the table of keys that the code used for command N of that system; with
`given` after N only those that the command itself has. What a key becomes is found out by giving it to the code. A test
fails when a page is stale.
"""

import contextlib
import copy
import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gptworks.errors import ConfigError, GPTWorksError
from gptworks.interop import command_line, registry, yaml_files
from gptworks.interop.adapt import adapted
from gptworks.interop.native_command import command_line as native_command_line
from gptworks.interop.notes import Note, setting_text
from gptworks.interop.settings import Key, Settings, parse_bool, parse_float, parse_int
from gptworks.interop.write_yaml import in_one_line

FOLDER = Path(__file__).parent
MARKER = re.compile(
    r"(<!-- (?P<kind>commands|keys): (?P<system>[\w-]+)(?P<words>[ \w]*) -->\n).*?(<!-- end -->)", re.DOTALL
)
# As they stand in the documents of the systems. GPT-3's are PaddleNLP's.
COMMANDS = {
    "fleetx": [
        "python run_pretrain.py -c ./configs_345m_single_card.yaml",
        "python run_pretrain.py -c ./configs_1.3B_single_card.yaml",
        "python run_generation.py -c configs_345m_single_card.yaml "
        "-o Engine.save_load.ckpt_dir=./ckpt/GPT_345M_300B_DP_20220826/mp_00_sharding_00_pp_00",
    ],
    "paddlenlp": [
        "python -u create_pretraining_data.py --model_name gpt2-en --tokenizer_name GPTTokenizer --data_format JSON "
        "--input_path /path/to/openwebtext/ --append_eos --output_prefix gpt_openwebtext --workers 40 "
        "--log_interval 10000",
        "CUDA_VISIBLE_DEVICES=0 python run_pretrain.py --model_type gpt --model_name_or_path gpt2-en "
        "--input_dir ./data --output_dir output --weight_decay 0.01 --grad_clip 1.0 --max_steps 500000 "
        "--save_steps 100000 --decay_steps 320000 --warmup_rate 0.01 --micro_batch_size 4 --device gpu",
        "python run_eval.py --model_name gpt2-en --eval_path ./wikitext-103/wiki.valid.tokens --overlapping_eval 32 "
        "--init_checkpoint_path ./output/model_1000/model_state.pdparams --batch_size 8 --device gpu",
        "python run_eval.py --model_name gpt2-en --eval_path ./lambada_test.jsonl --cloze_eval --batch_size 8 "
        "--device gpu",
        "python export_model.py --model_type=gpt --model_path=gpt2-en --output_path=./infer_model/model",
        "python deploy/python/inference.py --model_type gpt --model_path ./infer_model/model",
    ],
    "gpt-3": [
        'task_name=gpt3 python -u -m paddle.distributed.fleet.launch --gpus "0,1,2,3,4,5,6,7" '
        "--log_dir output/$task_name/log run_pretrain_static.py --model_type gpt --model_name_or_path gpt2-en "
        "--input_dir ./data --output_dir output/$task_name --max_seq_len 1024 --micro_batch_size 8 "
        "--global_batch_size 32 --sharding_degree 4 --mp_degree 2 --dp_degree 1 --pp_degree 1 --use_sharding true "
        "--use_amp true --use_recompute true --max_lr 0.00015 --min_lr 0.00001 --max_steps 500000 "
        "--save_steps 100000 --decay_steps 320000 --weight_decay 0.01 --warmup_rate 0.01 --grad_clip 1.0 "
        "--logging_freq 1 --eval_freq 10000 --device gpu",
    ],
    "oneflow": [
        "python3 tools/preprocess_data.py --input my-corpus.json --output-prefix gpt_sample_dataset "
        "--vocab gpt2-vocab.json --dataset-impl mmap --tokenizer-type GPT2BPETokenizer --merge-file gpt2-merges.txt "
        "--append-eod",
        "python3 -m oneflow_gpt.training --num-layers 24 --hidden-size 1024 --num-attention-heads 16 "
        "--micro-batch-size 4 --global-batch-size 8 --num-gpus-per-node 1 --train-iters 500000 "
        "--learning-rate 0.00015 --dataset gpt_sample_dataset_text_document --seq-length 1024 --split 949,50,1 "
        "--min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction 0.01 "
        "--weight-decay 1e-2 --optimizer adamw --clip-grad 1.0 --vocab-size 50257 --load checkpoint "
        "--save checkpoint --save-interval 10000 --log-interval 100 --checkpoint-activations "
        "--multihead-attention-fusion --fp16",
        "bash example/pretrain_345M.sh",
        "bash examples/pretrain_1n8d_2x4x1_16_1536x16.sh",
        "python3 tools/launch_container.py --src . --py 3.7 --image oneflow-manylinux2014-cuda11.2:0.1 "
        "--wheel oneflow-0.3.5+cu112.git.75f11b825-cp37-cp37m-manylinux2014_x86_64.whl "
        '--cmd "bash example/pretrain_345M.sh"',
    ],
    "mindformers": [
        "python run_mindformer.py --config configs/gpt2/run_gpt2.yaml --run_mode train --device_target Ascend "
        "--dataset_dir /your_path/wikitext-2-mindrecord",
        'python mindformers/tools/hccl_tools.py --device_num "[0,8]" --server_ip 10.155.111.140',
        "bash run_distribute.sh hccl_8p.json ../configs/gpt2/run_gpt2.yaml [0,8] train",
        "python mindformers/models/gpt2/convert_weight.py --layers 12 --torch_path pytorch_model.bin "
        "--mindspore_path ./mindspore_gpt2.ckpt",
    ],
    "megatron": [
        "python tools/preprocess_data.py --input my-corpus.json --output-prefix my-gpt2 --vocab-file gpt2-vocab.json "
        "--dataset-impl mmap --tokenizer-type GPT2BPETokenizer --merge-file gpt2-merges.txt --append-eod",
        "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 16 "
        "--seq-length 1024 --max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000 "
        "--save checkpoints/gpt2_345m --load checkpoints/gpt2_345m --data-path my-gpt2_text_document "
        "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1 --lr 0.00015 --min-lr 1.0e-5 "
        "--lr-decay-style cosine --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 --log-interval 100 "
        "--save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16",
    ],
    "nanogpt": [
        "python train.py --dataset=shakespeare_char --out_dir=out-shakespeare-char --eval_interval=250 --n_layer=6 "
        "--n_head=6 --n_embd=384 --block_size=256 --batch_size=64 --max_iters=5000 --lr_decay_iters=5000 "
        "--dropout=0.2 --device=cpu",
        "python sample.py --out_dir=out-shakespeare-char --num_samples=2",
    ],
}
DIALECT = {"gpt-3": "paddlenlp"}  # of the systems whose commands another module knows
WORDS = {
    False: ("their key", "their default", "ours", "remark", "keys"),
    True: ("对方的键", "对方的默认值", "gptworks", "说明（与程序输出一致，为英文）", "个键"),
}
# Words to try where the kind of value does not say what fits.
SAMPLES = {
    "Optimizer.name": ["AdamW", "FusedAdamW"],
    "Optimizer.lr.name": ["CosineAnnealingWithWarmupDecay"],
    "--visible_devices": ["0,1"],
    "--tokenizer-type": ["GPT2BPETokenizer"],
    "--recompute-granularity": ["full", "selective"],
    "--position-embedding-type": ["learned_absolute", "rope"],
    "--normalization": ["LayerNorm", "RMSNorm"],
    "--window-size": ["4095,0"],
    "--kv-channels": ["64", "128"],
    "Profiler.scheduler": ["[1, 5]"],
    "--lr_decay_style": ["cosine", "none"],
    "--lr-decay-style": ["cosine", "linear"],
    "-p": ["batch_range=[10,20]"],
    "--profiler_options": ["batch_range=[10,20]"],
    "--init_checkpoint_path": ["model_state.pdparams"],
}
# Settings that are looked at only beside others; None: without it.
_ROTARY: dict[str, str | None] = {"--position-embedding-type": "rope"}
_RMS: dict[str, str | None] = {"--normalization": "RMSNorm"}
BESIDE: dict[str, dict[str, str | None]] = {
    "--rotary-base": _ROTARY,
    "--rotary-percent": _ROTARY,
    "--rotary-seq-len-interpolation-factor": _ROTARY,
    "--use-rope-scaling": _ROTARY,
    "--rope-scaling-factor": {**_ROTARY, "--use-rope-scaling": ""},
    "--disable-bias-linear": _RMS,
    "--add-qkv-bias": {**_RMS, "--disable-bias-linear": ""},
    "--qk-layernorm": _RMS,
    "--num-query-groups": {"--group-query-attention": ""},
    "--bf16": {"--fp16": None},
    "Generation.num_beams": {"Generation.decode_strategy": "beam_search"},
    "Generation.length_penalty": {"Generation.decode_strategy": "beam_search"},
    "Generation.early_stopping": {"Generation.decode_strategy": "beam_search"},
    "Profiler.enable": {"Profiler.scheduler": "[1, 5]"},
    "Profiler.scheduler": {"Profiler.enable": "True"},
    "Distributed.sharding.sharding_stage": {
        "Distributed.sharding.sharding_degree": "2",
        "Data.batch_size.local_batch_size": "",
    },
    "--sharding_stage": {"--use_sharding": "true", "--sharding_degree": "2"},
    "--use_sharding": {"--sharding_degree": "2"},
    "--node-ips": {"--num-nodes": "2"},
    "parallel_config.data_parallel": {"use_parallel": "True", "parallel_config.model_parallel": "1"},
    "parallel_config.model_parallel": {
        "use_parallel": "True",
        "parallel.parallel_mode": "1",
        "parallel_config.data_parallel": "1",
    },
    "parallel_config.pipeline_stage": {
        "use_parallel": "True",
        "parallel.parallel_mode": "1",
        "parallel_config.data_parallel": "1",
    },
    "profile_start_step": {"profile": "True"},
    "profile_stop_step": {"profile": "True"},
}


def translation(system: str, command: str) -> Any:
    words = command_line.split([command], {}, Path())
    return registry.dialect(DIALECT.get(system, system)).translate(words, registry.Files(Path()))


@contextlib.contextmanager
def empty_folder() -> Iterator[None]:
    """So that nothing on disk has a say; with the rank table that a command names."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        devices = ", ".join(f'{{"device_id": "{n}", "device_ip": "", "rank_id": "{n}"}}' for n in range(8))
        servers = f'[{{"server_id": "10.155.111.140", "device": [{devices}], "host_nic_ip": "reserve"}}]'
        table = f'{{"version": "1.0", "server_count": "1", "server_list": {servers}, "status": "completed"}}'
        Path("hccl_8p.json").write_text(table, encoding="utf-8")
        read = yaml_files.read
        once = cache(read)
        yaml_files.read = lambda path: copy.deepcopy(once(path))  # hundreds of times the same files
        try:
            yield
        finally:
            yaml_files.read = read
            os.chdir(here)


@contextlib.contextmanager
def watched(more: Mapping[str, str | None]) -> Iterator[list[Settings]]:
    """The tables that a translation makes use of; with more given than the command has, or (None) less."""
    made: list[Settings] = []
    original = Settings.__init__

    def watching(self: Settings, where: str, keys: Any, given: Any, **rest: Any) -> None:
        table = list(keys)
        known = {key.theirs for key in table}
        changed = {**given, **{key: text for key, text in more.items() if key in known}}
        original(self, where, table, {key: text for key, text in changed.items() if text is not None}, **rest)
        made.append(self)

    Settings.__init__ = watching  # type: ignore[method-assign]
    try:
        yield made
    finally:
        Settings.__init__ = original  # type: ignore[method-assign]


def samples(key: Key, written: str | None) -> list[str]:
    """Values to try; first the one that stands in the command."""
    if written is not None:
        return list(dict.fromkeys([written, *samples(key, None)]))
    if key.theirs in SAMPLES:
        return SAMPLES[key.theirs]
    if key.switch:
        return [""]
    kinds: dict[Any, list[str]] = {parse_int: ["1", "2", "4", "8", "16", "64", "1024"], parse_float: ["0.5", "1"]}
    kinds |= {parse_bool: ["True", "False"]}
    default = [setting_text(key.default)] if key.default not in (None, "") else []
    return [*default, *kinds.get(key.read, ["1", "words"])]


def notes_on(system: str, command: str, key: Key, index: int, written: str | None) -> tuple[list[Note], str]:
    """What becomes of a key that no column of the table tells, by giving it several values; else why it is refused."""
    found: dict[tuple[str, str], Note] = {}
    refusal = ""
    beside: list[dict[str, str | None]] = [BESIDE[key.theirs], {}] if key.theirs in BESIDE else [{}]
    for more, text in itertools.product(beside, samples(key, written)):
        with watched({**more, key.theirs: text}) as made:
            try:
                translation(system, command)
            except ConfigError as error:  # this value does not go with the rest of the command, or none does
                refusal = next((line for line in error.problems if line.startswith(f"{key.theirs}: ")), refusal)
                continue
            except (GPTWorksError, ValueError):
                continue
        for note in made[index].notes:
            if note.theirs == key.theirs:
                found.setdefault((", ".join(names_in(note.ours)), note.why), note)
    return list(found.values()), refusal.removeprefix(f"{key.theirs}: ")


def names_in(ours: str) -> list[str]:
    """model.num_layers=4, --out=x -> the names alone."""
    return re.findall(r"(?:^|, )([A-Za-z_.-][\w.-]*)(?==|$| )", ours)


def row(system: str, command: str, key: Key, index: int, written: str | None) -> tuple[str, str, str]:
    """(their default, ours, remark)"""
    plain = setting_text(key.default).replace("\n", "\\n")  # a table's cell has one line
    default = f"`{plain}`" if key.default not in (None, "") else ""
    ours, remarks = [key.ours] if key.ours else [], [getattr(key, "same_effect", "") or key.ignored_because]
    stands_for = getattr(registry.dialect(DIALECT.get(system, system)), "FLAGS", {}).get(key.theirs)
    if stands_for and not any([*ours, *remarks]):
        return default, "", f"the same as `{stands_for}`"
    is_ignored = bool(key.ignored_because)
    if not key.ours and not remarks[0]:
        notes, refusal = notes_on(system, command, key, index, written)
        is_ignored = bool(notes) and all(note.how == "ignored" for note in notes)
        for note in sorted(notes, key=lambda note: note.how == "ignored"):
            ours += [name for name in names_in(note.ours) if name not in ours]
            other = "another value is ignored: " if note.how == "ignored" and not is_ignored else ""
            if note.why not in remarks:
                remarks.append(other + note.why)
        if not notes:
            remarks = [f"refused: {refusal}" if refusal else "by a rule, together with other settings"]
    told = "; ".join(filter(None, remarks)).replace("|", "\\|")
    ignored = "ignored: " if is_ignored and not ours else ""
    if ignored and key.harmless_values:
        usual = " or ".join(f"`{value}`" if value else "empty" for value in key.harmless_values)
        ignored = f"the same if {usual}; else {ignored}"
    return default, ", ".join(f"`{name}`" for name in ours), ignored + told


@cache
def rows(system: str, number_of_command: int, given_only: bool) -> list[tuple[list[str], str, str, str]]:
    """Neighbours that become the same share a row."""
    command = COMMANDS[system][number_of_command - 1]
    with watched({}) as made:
        translation(system, command)
    found: list[tuple[list[str], str, str, str]] = []
    for index, settings in enumerate(made):
        for key in settings.keys.values():
            if given_only and not settings.is_given(key.theirs):
                continue
            rest = row(system, command, key, index, settings.texts.get(key.theirs))
            if found and found[-1][1:] == rest and not rest[1]:
                found[-1] = ([*found[-1][0], key.theirs], *rest)
            else:
                found.append(([key.theirs], *rest))
    return found


def together(names: list[str]) -> str:
    """`A.b.x`, `A.b.y` and `A.b.z` as `A.b.{x, y, z}`."""
    groups: list[tuple[str, list[str]]] = []
    for name in names:
        prefix, dot, last = name.rpartition(".")
        if groups and groups[-1][0] == prefix + dot and dot:
            groups[-1][1].append(last)
        else:
            groups.append((prefix + dot, [last]))
    return ", ".join(
        f"`{prefix}{{{', '.join(lasts)}}}`" if len(lasts) > 1 else f"`{prefix}{lasts[0]}`" for prefix, lasts in groups
    )


def keys(system: str, words: str, chinese: bool) -> str:
    parts = words.split()
    found = rows(system, int(parts[0]), "given" in parts)
    *titles, count = WORDS[chinese]
    table = [f"| {' | '.join(titles)} |", "|---|---|---|---|"]
    table += [f"| {' | '.join([together(names), *rest])} |" for names, *rest in found]
    number_of_keys = sum(len(names) for names, *_ in found)
    if number_of_keys <= 40:
        return "\n".join(table) + "\n"
    program = Path(command_line.split([COMMANDS[system][int(parts[0]) - 1]], {}, Path()).program).name
    summary = f"{program}: {number_of_keys} {count}"
    return "\n".join([f"<details><summary>{summary}</summary>", "", *table, "", "</details>", ""])


@cache
def ours(system: str, command: str) -> str:
    found = adapted(translation(system, command), [], device=None, shrink=False, strict=False, runs=False)
    return in_one_line(native_command_line(found))


def commands(system: str) -> str:
    lines = []
    for command in COMMANDS[system]:
        typed = f"'{command}'" if "$" in command else command  # or the shell would look it up too early
        lines += ["```", f"$ gptworks run -- {typed}", ours(system, command), "```", ""]
    return "\n".join(lines)


def filled(text: str, chinese: bool) -> str:
    """A page with its generated parts made anew. Those of systems that are not here yet stay empty."""

    def fill(match: re.Match[str]) -> str:
        system = match["system"]
        if DIALECT.get(system, system) not in registry.NAMES:
            return match[1] + match[5]
        body = commands(system) if match["kind"] == "commands" else keys(system, match["words"], chinese)
        return f"{match[1]}\n{body}\n{match[5]}"

    with empty_folder():
        return MARKER.sub(fill, text)


def pages() -> list[Path]:
    return sorted(FOLDER.glob("*.md"))


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8"), page.name.endswith(".zh.md")), encoding="utf-8")
        print(page.name)
