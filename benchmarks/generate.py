"""Claim: on a CPU, gptworks writes text at least as fast as llama.cpp and CTranslate2 from the same weights.

    python benchmarks/generate.py [--batch 1 8] [--rounds 5] [--threads 2] [--only "gptworks int8" ...]

GPT-2's 124M shape with random weights, prompt of 64 tokens, 128 new ones, greedy, no early end. Each competitor lives
in a process of its own; all take turns, so that the noise of the machine meets them alike. A token needs every weight
once: the bound is the speed of reading memory, measured here, divided by the bytes of the matrices.
`make bench-generate` makes an environment with the competitors (llama.cpp is built from source, some minutes).
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from competitors import Race, machine

from gptworks import child_process, cpu
from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.tokenizer import Tokenizer

MODEL = ModelConfig()
PROMPT, NEW = 64, 128
Write = Callable[[list[list[int]]], list[list[int]]]  # prompts -> new tokens


def prompts_of(batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, MODEL.vocab_size - 1, (batch, PROMPT), generator=generator).tolist()


def gptworks(folder: Path, kind: str) -> Write:
    from gptworks.checkpoint.pretrained import PretrainedGPT
    from gptworks.generate.engine import continue_tokens

    model = PretrainedGPT.from_pretrained(folder / "hf", device="cpu", weights=kind)
    cfg = GenerateConfig(strategy="greedy", max_new_tokens=NEW, ignore_eod=True)
    return lambda prompts: [found[0].tokens for found in continue_tokens(model, prompts, cfg)]


def transformers(folder: Path, cache: str) -> Write:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder / "hf").eval()
    kind = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}

    def write(prompts: list[list[int]]) -> list[list[int]]:
        tokens = torch.tensor(prompts)
        with torch.no_grad():
            found = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                pad_token_id=MODEL.vocab_size - 1,
                **kind,
            )
        return found[:, PROMPT:].tolist()

    return write


def ctranslate2(folder: Path, kind: str) -> Write:
    from ctranslate2 import Generator

    generator = Generator(
        str(folder / f"ct2-{kind}"), device="cpu", compute_type=kind, intra_threads=torch.get_num_threads()
    )
    names = json.loads((folder / f"ct2-{kind}" / "vocabulary.json").read_text(encoding="utf-8"))

    def write(prompts: list[list[int]]) -> list[list[int]]:
        found = generator.generate_batch(
            [[names[token] for token in prompt] for prompt in prompts],
            max_length=NEW,
            min_length=NEW,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in found]

    return write


def llama_cpp(folder: Path, kind: str) -> Write:
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    model = Llama(
        str(folder / f"{kind}.gguf"), n_ctx=PROMPT + NEW, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def write(prompts: list[list[int]]) -> list[list[int]]:
        model.reset()
        found = []
        for token in model.generate(prompts[0], top_k=1, temp=0.0, repeat_penalty=1.0, reset=True):
            found.append(token)
            if len(found) == NEW:
                return [found]
        raise AssertionError("ended early")

    return write


# name -> (how to make it, its argument, batches, module it needs)
PEERS: dict[str, tuple[Callable[[Path, str], Write], str, tuple[int, ...], str]] = {
    "gptworks fp32": (gptworks, "fp32", (1, 8), "gptworks"),
    "gptworks bf16": (gptworks, "bf16", (1, 8), "gptworks"),
    "gptworks int8": (gptworks, "int8", (1, 8), "gptworks"),
    "transformers dynamic": (transformers, "dynamic", (1, 8), "transformers"),
    "transformers static": (transformers, "static", (1, 8), "transformers"),
    "CTranslate2 float32": (ctranslate2, "float32", (1, 8), "ctranslate2"),
    "CTranslate2 int8": (ctranslate2, "int8", (1, 8), "ctranslate2"),
    "llama.cpp f32": (llama_cpp, "f32", (1,), "llama_cpp"),
    "llama.cpp f16": (llama_cpp, "f16", (1,), "llama_cpp"),
    "llama.cpp q8_0": (llama_cpp, "q8_0", (1,), "llama_cpp"),
}
CLAIMS = [  # ours, theirs, batch, target
    ("gptworks fp32", "llama.cpp f32", 1, 1.0),
    ("gptworks fp32", "CTranslate2 float32", 1, 1.0),
    ("gptworks fp32", "CTranslate2 float32", 8, 1.0),
    ("gptworks int8", "CTranslate2 int8", 1, 2.0),
    ("gptworks int8", "CTranslate2 int8", 8, 1.0),
    ("gptworks int8", "llama.cpp q8_0", 1, 0.85),
    ("gptworks fp32", "transformers dynamic", 1, 1.0),
    ("gptworks fp32", "transformers static", 1, 1.0),
]


def write_models(folder: Path, modules: set[str]) -> dict[str, str]:
    """The same weights in everybody's form; module -> why not."""
    model = build_gpt(MODEL, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(), MODEL.num_layers, 1))
    tokenizer = Tokenizer.from_pretrained("gpt2")
    huggingface.save(
        folder / "hf", MODEL, {n: p.detach() for n, p in model.named_parameters()}, eod_id=tokenizer.eod_id
    )
    tokenizer.save(folder / "hf")
    # In children: what cannot be written, or dies of it, is left out.
    tried = {name: child_process.run(lambda name=name: FORMS[name](folder), 900) for name in FORMS if name in modules}
    return {name: outcome.failure for name, outcome in tried.items() if outcome.failure}


def write_ctranslate2(folder: Path) -> Iterator[str]:
    from ctranslate2.converters import TransformersConverter

    torch.set_num_threads(1)
    for kind in ("float32", "int8"):
        TransformersConverter(str(folder / "hf")).convert(str(folder / f"ct2-{kind}"), quantization=kind)
        yield kind


def write_llama_cpp(folder: Path) -> Iterator[str]:
    for kind in ("f32", "f16", "q8_0"):
        write_gguf(folder / f"{kind}.gguf", folder / "hf", MODEL, kind, Tokenizer.from_pretrained("gpt2"))
        yield kind


FORMS = {"ctranslate2": write_ctranslate2, "llama_cpp": write_llama_cpp}


def write_gguf(path: Path, hf: Path, cfg: ModelConfig, kind: str, tokenizer: Tokenizer) -> None:
    import gguf
    from safetensors.torch import load_file

    renamed = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm"}
    renamed |= {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    out = gguf.GGUFWriter(path, "gpt2")
    out.add_block_count(cfg.num_layers)
    out.add_context_length(cfg.max_positions)
    out.add_embedding_length(cfg.hidden_size)
    out.add_feed_forward_length(cfg.ffn_size)
    out.add_head_count(cfg.num_heads)
    out.add_layer_norm_eps(cfg.layernorm_eps)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    words = json.loads((hf / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    out.add_token_list(sorted(words["vocab"], key=words["vocab"].get))
    out.add_token_types([1] * len(words["vocab"]))
    out.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in words["merges"]])
    out.add_eos_token_id(tokenizer.eod_id)
    wanted = {"f32": None, "f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0}[kind]
    for name, tensor in load_file(hf / "model.safetensors").items():
        place, _, what = name.removeprefix("transformer.").rpartition(".")
        if place.startswith("h."):
            _, layer, part = place.split(".", 2)
            target = f"blk.{layer}.{renamed[part]}.{what}"
            if tensor.ndim == 2:  # GPT-2 keeps [inputs, outputs]
                tensor = tensor.T.contiguous()
        else:
            target = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}[place] + f".{what}"
        values = tensor.numpy()
        # llama.cpp wants vectors and positions in fp32.
        if wanted is None or values.ndim == 1 or place == "wpe":
            out.add_tensor(target, values)
        else:
            out.add_tensor(target, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def work(name: str, folder: Path, threads: int) -> None:
    """A competitor: for each batch size on standard input one turn; answers seconds and the tokens."""
    torch.set_num_threads(threads)
    cpu.settle()
    make, kind, _, _ = PEERS[name]
    write = make(folder, kind)
    write(prompts_of(1))
    print("ready", flush=True)
    for line in sys.stdin:
        prompts = prompts_of(int(line))
        before = time.perf_counter()
        found = write(prompts)
        print(json.dumps([time.perf_counter() - before, found]), flush=True)


def read_speed(threads: int) -> float:
    """GB/s of reading memory that is in no cache."""
    torch.set_num_threads(threads)
    data = torch.ones(128 * 2**20)
    best = 0.0
    for _ in range(7):
        before = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / 1e9 / (time.perf_counter() - before))
    return best


def compare(
    names: list[str], batches: list[int], rounds: int, threads: int, folder: Path, left_out: dict[str, str]
) -> None:
    command = [sys.executable, __file__, "--threads", str(threads), "--work"]
    race = Race({name: [*command, name, str(folder)] for name in names if name not in left_out}, left_out)
    matrices = sum(p.numel() for n, p in build_shapes().items() if p.ndim == 2 and n != "wpe.weight")
    for batch in batches:
        times: dict[str, list[float]] = {name: [] for name in race.names if batch in PEERS[name][2]}
        tokens: dict[str, list[list[int]]] = {}
        speed = read_speed(threads)
        for _ in range(rounds):
            for name in [name for name in times if name in race.names]:
                if (answer := race.ask(name, str(batch))) is not None:
                    seconds, tokens[name] = json.loads(answer)
                    times[name].append(seconds)
        report(batch, {name: times[name] for name in times if name in race.names}, tokens, speed, matrices)
    print()
    race.show_left_out()
    race.close()


def build_shapes() -> dict[str, torch.Tensor]:
    from gptworks.model import GPT

    with torch.device("meta"):
        return dict(GPT(MODEL).named_parameters())


def report(batch: int, times: dict[str, list[float]], tokens: dict, speed: float, matrices: int) -> None:
    rate = {name: batch * NEW / statistics.median(measured) for name, measured in times.items()}
    rounds = max((len(measured) for measured in times.values()), default=0)
    print(f"\nbatch {batch}: prompt {PROMPT}, {NEW} new tokens, {rounds} rounds, tokens/s")
    bounds = ", ".join(
        f"{kind} {batch * speed * 1e9 / (matrices * width):,.0f}"
        for kind, width in (("fp32", 4), ("bf16", 2), ("int8", 1))
    )
    print(f"  memory is read at {speed:.1f} GB/s; the bound of weights read once per step: {bounds}")
    print(f"  {'':<24}{'median':>8}{'best':>8}{'worst':>8}   same tokens as gptworks fp32")
    for name, measured in times.items():
        low, high = batch * NEW / max(measured), batch * NEW / min(measured)
        same = ""
        if "gptworks fp32" in tokens:
            pairs = zip(tokens[name], tokens["gptworks fp32"], strict=True)
            same = f"{sum(a == b for mine, ours in pairs for a, b in zip(mine, ours, strict=True))} of {batch * NEW}"
        print(f"  {name:<24}{rate[name]:>8.1f}{high:>8.1f}{low:>8.1f}   {same}")
    for ours, theirs, at, target in CLAIMS:
        if at == batch and ours in rate and theirs in rate:
            ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
            found = statistics.median(ratios)
            print(f"  {ours} / {theirs}: {found:.2f}x ({min(ratios):.2f} to {max(ratios):.2f}), target {target}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, choices=[1, 8], default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="NAME")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work[0], Path(args.work[1]), args.threads)
        return
    print(machine())
    left_out = {
        name: f"{PEERS[name][3]} is not installed"
        for name in args.only
        if importlib.util.find_spec(PEERS[name][3]) is None
    }
    with tempfile.TemporaryDirectory() as folder:
        failures = write_models(Path(folder), {PEERS[name][3] for name in args.only if name not in left_out})
        left_out |= {name: failures[PEERS[name][3]] for name in args.only if PEERS[name][3] in failures}
        compare(args.only, args.batch, args.rounds, args.threads, Path(folder), left_out)


if __name__ == "__main__":
    main()
