"""What FleetX says of generating text, in our words."""

from dataclasses import replace
from pathlib import Path

from gptworks.errors import ConfigError
from gptworks.interop.notes import Note
from gptworks.interop.settings import Settings

PROMPT = "Hi, GPT2. Tell me who Jack Ma is."  # the one in their run_generation.py


def read(settings: Settings) -> None:
    longest = settings["Generation.max_dec_len"]
    longest = 512 if longest < 0 or longest > 512 else longest
    settings.map("Generation.max_dec_len", {"generate.max_new_tokens": longest})
    theirs = settings["Generation.decode_strategy"]
    strategy = {"sampling": "sampling", "greedy_search": "greedy", "beam_search": "beam"}.get(theirs)
    if strategy is None:
        raise ConfigError(
            settings.where,
            [f"Generation.decode_strategy: got {theirs!r}; needs sampling, greedy_search or beam_search."],
        )
    settings.map("Generation.decode_strategy", {"generate.strategy": strategy})
    searching = ["Generation.num_beams", "Generation.length_penalty", "Generation.early_stopping"]
    if strategy == "beam":
        beams = settings["Generation.num_beams"]
        why = "" if beams >= 2 or not settings.is_given("Generation.num_beams") else "a beam search has 2 or more"
        settings.map("Generation.num_beams", {"generate.num_beams": max(2, beams)}, why=why)
        settings.map("Generation.length_penalty", "generate.length_penalty")
        settings.map("Generation.early_stopping", "generate.early_stopping")
    else:
        settings.same(searching, "only beam_search looks at it")
    settings.ours |= {"generate.rules": "paddle", "generate.seed": settings["Global.seed"]}


def arguments(settings: Settings, folder: Path) -> list[str]:
    checkpoint = settings["Engine.save_load.ckpt_dir"]
    if not checkpoint:
        raise ConfigError(
            settings.where,
            ["Engine.save_load.ckpt_dir: empty. Give the folder of model.pdparams: -o Engine.save_load.ckpt_dir=DIR."],
        )
    settings.map("Engine.save_load.ckpt_dir", {"--model": checkpoint})
    arguments = ["--model", str(checkpoint), "--tokenizer", "gpt2"]
    for key, value in settings.ours.items():
        if key.startswith("generate."):
            option = "--" + key.removeprefix("generate.").replace("_", "-")
            arguments += [option, str(value).lower() if isinstance(value, bool) else str(value)]
    if not _says_its_heads(folder / str(checkpoint)):
        arguments += ["-o", f"model.num_heads={settings.ours['model.num_heads']}"]
    return [*arguments, "--log-style", "fleetx", "--prompt", PROMPT]


def _says_its_heads(checkpoint: Path) -> bool:
    """Whether settings lie beside the weights; theirs have none, those we write do."""
    places = [checkpoint, checkpoint.parent] if checkpoint.name.startswith("mp_") else [checkpoint]
    return any((place / "model.yaml").is_file() for place in places)


def for_generation(note: Note) -> Note:
    """run_generation.py looks at little of the file."""
    if note.how == "ignored" or note.ours.startswith(("generate.", "--model", "model.num_heads")) or not note.ours:
        return note
    if note.ours.startswith("run.device"):
        return replace(note, ours=note.ours.replace("run.device=", "--device "))
    if note.ours.startswith("train.seed"):
        return replace(note, ours=note.ours.replace("train.seed=", "--seed "))
    if note.ours.startswith("model."):
        return replace(note, how="mapped", ours="", why="the weights say it")
    return replace(note, how="mapped", ours="", why="is for training; run_generation.py does not look at it")
