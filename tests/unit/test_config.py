"""Defaults < preset < base files < file < overrides; every problem reported, together, with the value and the fix."""

import json
import os
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml

from gptworks.config import checks, from_dict, load, load_with_origins, other_names
from gptworks.config.derive import derived
from gptworks.config.load import flatten, known_keys
from gptworks.config.schema import ModelConfig, OptimConfig, RunConfig
from gptworks.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(*overrides: str, path: Path | None = None, preset: str = "") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, preset=preset, overrides=overrides)
    return caught.value.problems


# Where values come from


def test_each_layer_wins_over_the_one_below(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "preset: tiny\nmodel: {num_layers: 3, num_heads: 8}\noptim: {lr: 1e-3, clip: 0.5}\n")
    path = write(tmp_path / "run.yaml", "base: base.yaml\nmodel: {num_layers: 5}\noptim:\n  lr: 2e-3\n")
    loaded = load_with_origins(path, overrides=["optim.lr=5e-3"])
    config = loaded.config
    assert config.model.hidden_size == 128  # preset
    assert config.model.num_heads == 8  # base over preset
    assert config.model.num_layers == 5  # file over base
    assert config.optim.clip == 0.5  # base
    assert config.optim.lr == 5e-3  # override over file
    assert config.optim.beta1 == 0.9  # default
    assert loaded.origins == {
        "model.num_layers": f"{path}:2",
        "model.hidden_size": "preset tiny",
        "model.num_heads": f"{tmp_path / 'base.yaml'}:2",
        "model.vocab_size": "preset tiny",
        "model.max_positions": "preset tiny",
        "optim.lr": "override optim.lr=5e-3",
        "optim.clip": f"{tmp_path / 'base.yaml'}:3",
        "data.seq_len": "model.max_positions",  # derived
        "model.ffn_size": "4 x model.hidden_size",
        "model.num_kv_heads": "model.num_heads",
        "model.head_size": "model.hidden_size / model.num_heads",
    }


def test_later_base_wins_over_earlier(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "train: {seed: 1, log_every: 7}\n")
    write(tmp_path / "sub" / "b.yaml", "base: ../a.yaml\ntrain: {seed: 2}\n")  # relative to the file that names it
    path = write(tmp_path / "run.yaml", "base: [a.yaml, sub/b.yaml]\n")
    assert (load(path).train.seed, load(path).train.log_every) == (2, 7)


def test_preset_of_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "preset: tiny\n")
    assert load(path).model.vocab_size == 50257
    assert load(path, preset="tiny-4k").model.vocab_size == 4096


def test_shape_of_the_checkpoint_is_below_everything_that_is_said() -> None:
    asked = []

    def shape_of(folder: str, stated: dict[str, Any]) -> dict[str, int]:
        asked.append(folder)
        assert stated["num_layers"] == 3 and ("hidden_size" in stated) == ("vocab_size" in stated)  # all of a preset
        return {"num_layers": 2, "hidden_size": 96, "num_heads": 6}

    overrides = ["init.checkpoint=runs/a", "model.num_layers=3"]
    loaded = load_with_origins(overrides=overrides, shape_of=shape_of)
    model = loaded.config.model
    assert (model.num_layers, model.hidden_size, model.num_heads, model.ffn_size) == (3, 96, 6, 384)
    assert loaded.origins["model.hidden_size"] == "checkpoint runs/a"
    assert load_with_origins(preset="tiny", overrides=overrides, shape_of=shape_of).config.model.hidden_size == 128
    assert asked == ["runs/a", "runs/a"]
    assert load_with_origins(overrides=["init.checkpoint="], shape_of=shape_of).config.model.num_layers == 12
    assert asked == ["runs/a", "runs/a"]


def test_empty_values_and_empty_sections_mean_the_default(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "model:\noptim:\n  lr:\n  clip: null\nprecision:\n  scaler:\nbase:\npreset:\n")
    assert load(path) == RunConfig()
    assert load(write(tmp_path / "empty.yaml", "")) == RunConfig()
    assert load(overrides=["optim.lr="]).optim.lr == RunConfig().optim.lr


def test_ffn_follows_hidden_and_sequence_follows_positions() -> None:
    config = load(overrides=["model.hidden_size=96", "model.num_heads=4", "model.max_positions=64"])
    assert (config.model.ffn_size, config.model.head_size, config.data.seq_len) == (384, 24, 64)
    assert load(overrides=["model.max_positions=64", "data.seq_len=16"]).data.seq_len == 16


def test_whole_numbers_may_be_written_as_floats() -> None:
    config = load(overrides=["train.tokens=3e11", "optim.warmup_steps=36.5", "optim.lr=1"])
    assert config.train.tokens == 300_000_000_000 and isinstance(config.train.tokens, int)
    assert (config.optim.warmup_steps, config.optim.lr) == (36.5, 1.0)
    assert problems_of("train.steps=1.5") == [
        "train.steps: got 1.5; input should be a valid integer. (override train.steps=1.5)"
    ]


@pytest.mark.parametrize(
    ("text", "expected"), [("949,50,1", (949, 50, 1)), ("90/10", (90, 10)), ("[1, 0, 0]", (1, 0, 0))]
)
def test_split_spellings(text: str, expected: tuple[float, ...]) -> None:
    assert load(overrides=[f"data.split={text}"]).data.split == expected


def test_one_path_or_several() -> None:
    assert load(overrides=["data.path=a/b"]).data.path == ("a/b",)
    config = load(overrides=["data.path=[a, b]", "data.weights=[1, 3]"])
    assert (config.data.path, config.data.weights) == (("a", "b"), (1.0, 3.0))


def test_config_is_frozen() -> None:
    config = RunConfig()
    with pytest.raises(ConfigError, match=r"optim.lr: cannot be set to 1.0"):
        config.optim.lr = 1.0


def test_every_key_of_the_schema_is_known_and_settable_from_what_is_dumped() -> None:
    dumped = RunConfig().model_dump(mode="json")
    assert set(flatten(dumped)) == set(known_keys())
    assert from_dict(dumped) == RunConfig()


def test_every_field_has_a_description() -> None:
    def fields(section: type[pydantic.BaseModel]):
        for name, field in section.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
                yield from fields(field.annotation)
            else:
                yield f"{section.__name__}.{name}", field.description

    assert [name for name, description in fields(RunConfig) if not description] == []


# What is refused


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.num_layer=3", "model.num_layer: unknown key; did you mean 'num_layers'?"),
        ("num_layers=3", "num_layers: unknown key; did you mean 'model.num_layers'?"),
        ("train.lr=3", "train.lr: unknown key; did you mean 'optim.lr'?"),
        ("optm.lr=3", "optm.lr: unknown key; did you mean 'optim.lr'?"),
        ("precision.scaler.foor=1", "precision.scaler.foor: unknown key; did you mean 'scaler.floor'?"),
        ("batch.xyzzy=1", "batch.xyzzy: unknown key. Keys of batch: global_size, micro_size, accumulation."),
        ("xyzzy.q=1", "xyzzy.q: unknown key. Sections: model, init, data, batch, optim,"),
        ("model=3", "model: 3 is not a section. A section has keys, such as 'model.num_layers'. (override model=3)"),
        ("precision.scaler=7", "precision.scaler: 7 is not a section."),
        # What other tools call it: nanoGPT, Hugging Face, litgpt, Megatron, and what people say.
        ("optim.learning_rate=1", "optim.learning_rate: unknown key; did you mean 'lr'?"),
        ("learning-rate=1", "learning-rate: unknown key; did you mean 'optim.lr'?"),
        ("optim.lerning_rate=1", "optim.lerning_rate: unknown key; did you mean 'lr'?"),
        ("train.max_iters=1", "train.max_iters: unknown key; did you mean 'steps'?"),
        ("max_steps=1", "max_steps: unknown key; did you mean 'train.steps'?"),
        ("model.n_layer=1", "model.n_layer: unknown key; did you mean 'num_layers'?"),
        ("model.n_embd=1", "model.n_embd: unknown key; did you mean 'hidden_size'?"),
        ("model.hidden_dim=1", "model.hidden_dim: unknown key; did you mean 'hidden_size'?"),
        ("model.num_attention_heads=1", "model.num_attention_heads: unknown key; did you mean 'num_heads'?"),
        ("train.micro_batch_size=1", "train.micro_batch_size: unknown key; did you mean 'batch.micro_size'?"),
        ("train.lr_warmup_steps=1", "train.lr_warmup_steps: unknown key; did you mean 'optim.warmup_steps'?"),
        ("batch_size=1", "batch_size: unknown key; did you mean 'batch.global_size' or 'batch.micro_size'?"),
        ("model.block_size=1", "model.block_size: unknown key; did you mean 'max_positions'?"),
        ("block_size=1", "block_size: unknown key; did you mean 'data.seq_len' or 'model.max_positions'?"),
        ("tensor-model-parallel-size=2", "tensor-model-parallel-size: unknown key; did you mean 'parallel.tp'?"),
        ("model.num_layers.deep=1", "model.num_layers.deep: unknown key; did you mean 'num_layers'?"),
    ],
)
def test_s0_02_unknown_keys_name_the_nearest(override: str, expected: str) -> None:
    (problem,) = problems_of(override)
    assert problem.startswith(expected)
    assert problem.endswith(f"(override {override})")


@pytest.mark.parametrize(
    ("override", "key", "shown"),
    [
        ("model.num_layers=twelve", "model.num_layers", "'twelve'"),
        ("model.num_layers='12'", "model.num_layers", "'12'"),
        ("model.num_layers=0", "model.num_layers", "0"),
        ("model.num_layers=[1]", "model.num_layers", "(1,)"),
        ("model.tied=1", "model.tied", "1"),
        ("model.tied=yes", "model.tied", "'yes'"),
        ("model.gelu=relu", "model.gelu", "'relu'"),
        ("model.dropout_hidden=1.0", "model.dropout_hidden", "1.0"),
        ("optim.lr=-1e-4", "optim.lr", "-0.0001"),
        ("optim.lr=.inf", "optim.lr", "inf"),
        ("optim.min_lr=.nan", "optim.min_lr", "nan"),
        ("optim.eps=0", "optim.eps", "0"),
        ("train.seed=-1", "train.seed", "-1"),
        ("train.steps=1e400", "train.steps", "inf"),
        ("run.out=7", "run.out", "7"),
        ("run.out={a: 1}", "run.out", "'a block'"),
        ("data.split=a,b", "data.split", "'a,b'"),
        ("data.split=[1, -2]", "data.split", "-2"),
        ("data.weights=0", "data.weights", "0"),
        ("precision.scaler.init=-1", "precision.scaler.init", "-1"),
        ("precision.compute=fp8", "precision.compute", "'fp8'"),
        ("generate.top_p=1.5", "generate.top_p", "1.5"),
    ],
)
def test_wrong_values_are_named(override: str, key: str, shown: str) -> None:
    (problem,) = problems_of(override)
    assert problem.startswith(f"{key}: got {shown}; ")
    assert problem.endswith(f"(override {override})")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["model.hidden_size=100", "model.num_heads=7"],
            "model.num_heads: 7 does not divide model.hidden_size (100). Nearest that do: 4 or 5.",
        ),
        (
            ["data.path=[a, b]", "data.weights=[1, 2, 3]"],
            "data.weights: 3 weights for 2 paths; give one for each.",
        ),
        (["data.split=1,2,3,4"], "data.split: got [1.0, 2.0, 3.0, 4.0]; needs one to three shares"),
        (["data.split=0,0"], "data.split: got [0.0, 0.0]; needs one to three shares, not all zero"),
        (["train.steps=10", "train.tokens=5e6"], "train.steps: several ends are given (train.steps=10, train.tokens=5"),
        (["train.profile=[5, 3]"], "train.profile: got [5, 3]; needs [first, last] with 1 <= first <= last."),
        (["train.profile=[5, 9]", "train.steps=8"], "train.profile: step 9 is after the last one (train.steps=8)."),
        (
            ["optim.schedule=wsd", "optim.warmup_steps=81", "train.steps=100"],  # the cooldown is a fifth
            "optim.cooldown_steps: warmup (81) and cooldown (20) together are longer than train.steps (100).",
        ),
        (
            ["data.seq_len=2048"],
            "data.seq_len: 2048 is longer than model.max_positions (1024). Set data.seq_len=1024, or "
            "model.max_positions=2048.",
        ),
        (
            ["optim.warmup_steps=200", "train.steps=100"],
            "optim.warmup_steps: 200 is longer than train.steps (100). Shorten the warmup.",
        ),
        (
            ["optim.warmup_steps=60", "optim.decay_steps=50", "train.steps=100"],
            "optim.warmup_steps: 60 is longer than optim.decay_steps (50).",
        ),
        (
            ["optim.schedule=wsd", "optim.warmup_steps=60", "optim.cooldown_steps=50", "train.steps=100"],
            "optim.cooldown_steps: warmup (60) and cooldown (50) together are longer than train.steps (100).",
        ),
        (
            ["evaluate.every=5", "data.split=1"],
            "evaluate.every: 5, but data.split [1.0] leaves nothing held out.",
        ),
        (
            ["checkpoint.keep_best=true", "evaluate.every=0"],
            "checkpoint.keep_best: true needs a held-out loss. Set evaluate.every.",
        ),
        (
            ["checkpoint.keep_best=true", "data.split=1"],
            "checkpoint.keep_best: true needs a held-out loss. Set a second share such as data.split='949,50,1'",
        ),
        (
            ["evaluate.patience=3", "evaluate.every=0"],
            "evaluate.patience: 3 needs a held-out loss. Set evaluate.every.",
        ),
    ],
)
def test_contradictions_give_both_numbers(overrides: list[str], expected: str) -> None:
    (problem,) = problems_of(*overrides)
    assert problem.startswith(expected)


def test_a_check_over_a_whole_section_says_where_its_key_was_set(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "model:\n  hidden_size: 100\n  num_heads: 7\n")
    (problem,) = problems_of(path=path)
    assert problem.endswith(f"Nearest that do: 4 or 5. ({path}:3)")


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.seq_len=1024"],
        ["optim.warmup_steps=100", "train.steps=100"],
        ["optim.schedule=wsd", "optim.warmup_steps=50", "optim.cooldown_steps=50", "train.steps=100"],
        ["evaluate.every=5", "evaluate.patience=2", "checkpoint.keep_best=true"],
        ["evaluate.every=5", "data.split=90,10"],
        ["optim.lr=1e-4", "optim.min_lr=1e-4"],
        ["model.hidden_size=100", "model.num_heads=5"],
    ],
)
def test_limits_themselves_are_allowed(overrides: list[str]) -> None:
    load(overrides=overrides)


def test_warmup_is_checked_again_when_the_number_of_steps_is_known() -> None:
    load(overrides=["optim.warmup_steps=50", "train.epochs=2"])  # not known yet
    assert checks.warmup_fits(OptimConfig(warmup_steps=50), 50, "the training") == []
    (problem,) = checks.warmup_fits(OptimConfig(warmup_steps=50), 49, "the training")
    assert problem.startswith("optim.warmup_steps: 50 is longer than the training (49).")


def test_several_problems_are_reported_together(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.yaml",
        "model:\n  num_layer: 4\n  hidden_size: big\ndata:\n  seq_len: 4096\noptim: {lr: 1e-5, min_lr: 5e-5}\n",
    )
    with pytest.raises(ConfigError) as caught:
        load(path, overrides=["nonsense", "train.steps=-1"])
    assert str(caught.value).splitlines() == [
        f"{path}: 5 problems",
        "  nonsense: an override has the form section.key=value, such as optim.lr=1e-4.",
        f"  model.num_layer: unknown key; did you mean 'num_layers'? ({path}:2)",
        f"  model.hidden_size: got 'big'; input should be a valid integer. ({path}:3)",
        "  train.steps: got -1; input should be greater than or equal to 0. (override train.steps=-1)",
        "  optim.min_lr: 5e-05 is above optim.lr (1e-05). Swap them, set optim.schedule: constant, "
        "or optim.allow_rising_lr: true if the rate is meant to rise after the warmup.",
    ]


@pytest.mark.parametrize("text", ["optim.lr", "=3", "  =3", ""])
def test_override_syntax(text: str) -> None:
    (problem,) = problems_of(text)
    more = " Here the value is missing; there are no blanks around the = of optim.lr=VALUE." * (text == "optim.lr")
    assert problem == f"{text}: an override has the form section.key=value, such as optim.lr=1e-4.{more}"


def test_override_value_may_hold_equals_signs_and_spaces() -> None:
    assert load(overrides=[" run.out =a=b c"]).run.out == "a=b c"


# base: and preset:


def test_base_files_that_include_each_other(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "base: ./c.yaml\n")
    write(tmp_path / "c.yaml", "base: a.yaml\n")
    (problem,) = problems_of(path=first)
    assert "base: files include each other" in problem
    assert [problem.index(f"{name}.yaml") for name in "abc"] == sorted(problem.index(f"{name}.yaml") for name in "abc")
    itself = write(tmp_path / "self.yaml", "base: self.yaml\n")
    assert "self.yaml -> " in problems_of(path=itself)[0]


def test_two_bases_may_share_a_base(tmp_path: Path) -> None:
    write(tmp_path / "root.yaml", "train: {seed: 9}\n")
    write(tmp_path / "a.yaml", "base: root.yaml\noptim: {lr: 0.5}\n")
    write(tmp_path / "b.yaml", "base: root.yaml\noptim: {clip: 0.5}\n")
    config = load(write(tmp_path / "run.yaml", "base: [a.yaml, b.yaml]\n"))
    assert (config.train.seed, config.optim.lr, config.optim.clip) == (9, 0.5, 0.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base: 3\n", "base: got 3; needs a name or a list."),
        ("base: [3]\n", "base: got [3]; needs a name or a list."),
        ("base: {a: 1}\n", "base: got a block; needs a name or a list."),
        ("preset: {tiny: 1}\n", "preset: got a block; needs a name."),
        ("preset: 345\n", "preset: got 345; needs a name."),
        ("preset: [tiny, gpt2]\n", "preset: got ['tiny', 'gpt2']; needs one name."),
    ],
)
def test_base_and_preset_need_names(text: str, expected: str, tmp_path: Path) -> None:
    assert problems_of(path=write(tmp_path / "run.yaml", text)) == [expected]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: 1 problem\n  no such file"):
        load(tmp_path / "nowhere.yaml")
    path = write(tmp_path / "run.yaml", "base: gone.yaml\n")
    with pytest.raises(ConfigError, match=r"gone\.yaml: 1 problem\n  no such file"):
        load(path)
    with pytest.raises(ConfigError, match=f"{tmp_path.name}: 1 problem\n  is a folder; needs a YAML file"):
        load(tmp_path)


# The command line


def test_config_show_origin_and_bare_overrides(tmp_path: Path, run_cli) -> None:
    path = write(tmp_path / "run.yaml", "preset: tiny\ntrain:\n  steps: 7\n")
    done = run_cli("config", "show", "-c", path, "-o", "optim.lr=1e-4", "train.seed=3", "--origin")
    lines = {line.partition(":")[0]: " ".join(line.split()) for line in done.stdout.splitlines()}
    assert lines["optim.lr"] == "optim.lr: 0.0001 # override optim.lr=1e-4"
    assert lines["train.seed"] == "train.seed: 3 # override train.seed=3"
    assert lines["train.steps"] == f"train.steps: 7 # {path}:3"
    assert lines["model.hidden_size"] == "model.hidden_size: 128 # preset tiny"
    assert lines["optim.beta1"] == "optim.beta1: 0.9 # default"
    assert set(lines) == set(known_keys())


def test_config_show_can_be_loaded_again(tmp_path: Path, run_cli) -> None:
    options = ["--preset", "345M", "data.path=[a, b]", "data.split=1,2,3", "optim.lr=3e-7"]
    shown = run_cli("config", "show", *options).stdout
    again = load(write(tmp_path / "shown.yaml", shown))
    assert again == load(preset="345M", overrides=options[2:])
    assert json.loads(run_cli("config", "show", *options, "--json").stdout) == again.model_dump(mode="json")
    assert yaml.safe_load(shown)["optim"]["clip"] == 1.0


def test_config_errors_exit_2_without_a_traceback(tmp_path: Path, run_cli) -> None:
    path = write(tmp_path / "run.yaml", "model:\n  num_layer: 4\n")
    done = run_cli("config", "check", "-c", path, "train.steps=x", expect=2)
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"error: {path}: 2 problems",
        f"  model.num_layer: unknown key; did you mean 'num_layers'? ({path}:2)",
        "  train.steps: got 'x'; input should be a valid integer. (override train.steps=x)",
    ]


def test_config_check_and_diff(tmp_path: Path, run_cli) -> None:
    one = write(tmp_path / "one.yaml", "optim: {lr: 1e-3}\n")
    two = write(tmp_path / "two.yaml", "optim: {lr: 2e-3}\ndata: {path: x}\n")
    assert run_cli("config", "check", "-c", one).stdout == f"{one}: no problems{os.linesep}"
    assert run_cli("config", "diff", one, two).stdout.splitlines() == [
        "data.path: [] -> ['x']",
        "optim.lr: 0.001 -> 0.002",
    ]


def test_config_schema_describes_every_section(run_cli) -> None:
    schema = json.loads(run_cli("config", "schema").stdout)
    assert set(schema["properties"]) == {*RunConfig.model_fields, "base", "preset"}
    num_heads, empty = schema["$defs"]["ModelConfig"]["properties"]["num_heads"]["anyOf"]
    assert num_heads["description"].startswith("Attention heads") and empty == {"type": "null"}
    assert schema["$defs"]["ModelConfig"]["additionalProperties"] is False


def test_what_other_tools_call_a_setting_is_a_setting_of_ours() -> None:
    tables = (
        other_names.NANOGPT,
        other_names.MEGATRON,
        other_names.HUGGING_FACE,
        other_names.LITGPT,
        other_names.OTHERS,
    )
    known = {*known_keys(), "--resume"}
    for table in tables:
        assert all(name == name.lower() and "-" not in name for name in table)
        assert {key for keys in table.values() for key in keys} <= known


def test_two_tools_that_use_a_name_mean_the_same_by_it() -> None:
    """Where they do not, the table must not hide one of the meanings."""
    meanings: dict[str, set[tuple[str, ...]]] = {}
    for table in (
        other_names.NANOGPT,
        other_names.MEGATRON,
        other_names.HUGGING_FACE,
        other_names.LITGPT,
        other_names.OTHERS,
    ):
        for name, keys in table.items():
            meanings.setdefault(name, set()).add(keys)
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}


def test_what_is_derived_of_the_batch_and_the_evaluation() -> None:
    assert derived(load(preset="tiny", overrides=["train.steps=200"])) == {
        "batch.global_size": (16, "suits a model of this size, 128 tokens each"),
        "batch.micro_size": (16, "from the rest of the batch"),
        "batch.accumulation": (1, "from the rest of the batch"),
        "evaluate.every": (20, "a tenth of train.steps, or train.log_every"),
    }
    said = load(preset="tiny", overrides=["batch.micro_size=4", "evaluate.every=0", "train.steps=200"])
    assert derived(said) == {
        "batch.global_size": (4, "from the rest of the batch"),
        "batch.accumulation": (1, "from the rest of the batch"),
    }
    assert derived(load(preset="tiny", overrides=["batch.global_size=8", "data.split=1", "parallel.dp=auto"])) == {}


def test_the_vocabulary_is_that_of_the_data_where_nothing_else_says() -> None:
    asked: list[tuple[list[str], str]] = []

    def vocabulary_of(paths: list[str], tokenizer: str) -> int | None:
        asked.append((paths, tokenizer))
        return 512 if paths == ["data/a", "data/b"] else None

    def found(*overrides: str, preset: str = "") -> tuple[int, str]:
        loaded = load_with_origins(preset=preset, overrides=overrides, vocabulary_of=vocabulary_of)
        return loaded.config.model.vocab_size, loaded.origins.get("model.vocab_size", "default")

    assert found("data.path=[data/a, data/b]") == (512, "tokenizer of data/a, data/b")
    assert found("data.path=[data/a, data/b]", "model.vocab_size=600") == (600, "override model.vocab_size=600")
    assert found("data.path=[data/a, data/b]", preset="tiny") == (50257, "preset tiny")
    assert found("data.path=data/c", "data.tokenizer=mine") == (50257, "default")  # nobody knows it
    assert found() == (50257, "default")
    assert asked == [(["data/a", "data/b"], ""), (["data/c"], "mine")]


# The kinds of model


def test_what_contradicts_itself_in_a_model_is_said_together() -> None:
    with pytest.raises(ConfigError) as refused:
        from_dict(
            {
                "model": {
                    "hidden_size": 60,
                    "num_heads": 6,
                    "num_kv_heads": 4,
                    "rope_theta": 5e5,
                    "mlp": "swiglu",
                    "gelu": "erf",
                    "rope_scaling": {"type": "llama3", "factor": 8.0, "beta_fast": 3.0},
                }
            }
        )
    text = str(refused.value)
    for said in (
        "model.num_kv_heads: 4 does not divide model.num_heads (6), which share them in equal groups. "
        "Nearest that do: 2 or 3",
        "model.rope_theta: 500000.0, but model.positions is learned. Set model.positions: rope",
        "model.rope_scaling.type: llama3, but model.positions is learned",
        "model.rope_scaling.beta_fast: 3.0, but model.rope_scaling.type is llama3. It belongs to yarn",
        "model.gelu: erf, but model.mlp is swiglu",
    ):
        assert said in text, said
    assert len(refused.value.problems) == 5


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": 28, "num_heads": 4, "positions": "rope"}, "model.head_size: 7 is odd"),
        ({"sliding_window": -1}, "model.sliding_window: got -1"),
        ({"rope_scaling": {"type": "dynamic"}}, "model.rope_scaling.type: got 'dynamic'"),
        ({"rope_scaling": {"factor": 0.5}}, "model.rope_scaling.factor: got 0.5"),
        ({"rope_scaling": {"factor": 2.0}}, "model.rope_scaling.factor: 2.0, but model.rope_scaling.type is none"),
        (
            {"positions": "rope", "rope_scaling": {"type": "llama3", "low_freq_factor": 4.0}},
            "model.rope_scaling.low_freq_factor: 4 is not below high_freq_factor (4)",
        ),
        (
            {"positions": "rope", "rope_scaling": {"type": "yarn", "beta_slow": 32.0}},
            "model.rope_scaling.beta_slow: 32 is not below beta_fast (32)",
        ),
        ({"norm": "batchnorm"}, "model.norm: got 'batchnorm'"),
        ({"num_kv_heads": 0}, "model.num_kv_heads: got 0"),
    ],
)
def test_what_is_wrong_with_a_model(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_dict({"model": values})
    assert said in str(refused.value)


def test_what_follows_from_other_keys_of_a_model() -> None:
    gated = ModelConfig(hidden_size=768, num_heads=12, mlp="swiglu")
    assert (gated.ffn_size, gated.num_kv_heads, gated.head_size) == (2048, 12, 64)
    wide = ModelConfig(hidden_size=100, num_heads=16, head_size=128)  # heads need not make up the stream
    assert wide.head_size == 128
    again = ModelConfig(**gated.model_dump())
    assert again == gated
