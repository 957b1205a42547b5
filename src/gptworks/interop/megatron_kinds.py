"""Flags of Megatron-LM that make another decoder than GPT-2: Llama, Mistral, Qwen. Each is a key of the model."""

from gptworks.errors import ConfigError
from gptworks.interop.megatron_flags import KERNEL
from gptworks.interop.settings import Key, Settings, parse_float, parse_int, parse_str

_HEADS = ("--group-query-attention", "--num-query-groups")
_BIASES = ("--disable-bias-linear", "--add-qkv-bias")
_ROPE = (
    "--rotary-base", "--rotary-percent", "--rotary-seq-len-interpolation-factor", "--use-rope-scaling",
    "--rope-scaling-factor",
)  # fmt: skip
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}

KEYS = [
    Key("--position-embedding-type", parse_str, default="learned_absolute"),
    Key("--use-rotary-position-embeddings", parse_str, switch=True),
    Key("--rotary-base", parse_float, default=10000.0),
    Key("--rotary-percent", parse_float, default=1.0),
    Key("--rotary-seq-len-interpolation-factor", parse_float),
    Key("--use-rope-scaling", parse_str, switch=True),
    Key("--rope-scaling-factor", parse_float, default=8.0),
    Key("--normalization", parse_str, default="LayerNorm"),
    Key("--swiglu", parse_str, switch=True),
    Key("--ffn-hidden-size", parse_int),
    Key("--disable-bias-linear", parse_str, switch=True),
    Key("--add-qkv-bias", parse_str, switch=True),
    Key("--group-query-attention", parse_str, switch=True),
    Key("--num-query-groups", parse_int, default=1),
    Key("--kv-channels", parse_int),
    Key("--qk-layernorm", parse_str, switch=True),
    Key("--window-size", parse_str),
    *[
        Key(f"--{name}", parse_str, switch=True, same_effect=KERNEL)
        for name in ("no-bias-swiglu-fusion", "apply-rope-fusion", "no-rope-fusion")
    ],
]


def kind(settings: Settings) -> None:
    """Their keys of the model that decide which decoder it is."""
    norm = _one_of(settings, "--normalization", _NORMS)
    if norm != "layernorm":
        settings.map("--normalization", {"model.norm": norm})
    settings.same("--normalization", "LayerNorm, as here")
    _positions(settings)
    _heads(settings)
    _biases(settings, norm)
    _feed_forward(settings)
    _window(settings)


def is_of_today(settings: Settings) -> bool:
    """Whether it is another decoder than GPT-2."""
    names = {"norm", "positions", "num_kv_heads", "head_size", "qk_norm", "bias", "mlp", "sliding_window"}
    return any(f"model.{name}" in settings.ours for name in names)


def _one_of(settings: Settings, flag: str, known: dict[str, str]) -> str:
    if settings[flag] not in known:
        raise ConfigError(settings.where, [f"{flag}: got {settings[flag]!r}; needs one of {', '.join(known)}."])
    return known[settings[flag]]


def _positions(settings: Settings) -> None:
    positions = _one_of(settings, "--position-embedding-type", _POSITIONS)
    if settings.is_given("--use-rotary-position-embeddings"):  # until 2023, beside the type
        positions = "rope"
    names = ["--position-embedding-type", "--use-rotary-position-embeddings"]
    if positions != "learned":
        settings.map(names, {"model.positions": positions})
    settings.same(names, "learned positions, as here")
    if positions != "rope":
        settings.ignore(_ROPE, "positions are not rotary")
        return
    if settings["--rotary-percent"] != 1:
        raise ConfigError(
            settings.where,
            [f"--rotary-percent: {settings['--rotary-percent']:g}; partial rotary embeddings are not supported."],
        )
    settings.same("--rotary-percent", "whole heads are turned, as here")
    settings.map("--rotary-base", "model.rope_theta")
    stretched, is_llama3 = settings["--rotary-seq-len-interpolation-factor"], settings.is_given("--use-rope-scaling")
    if stretched and is_llama3:
        raise ConfigError(
            settings.where, ["--use-rope-scaling and --rotary-seq-len-interpolation-factor: give one of them."]
        )
    if stretched:
        scaling = {"model.rope_scaling.type": "linear", "model.rope_scaling.factor": stretched}
        settings.map("--rotary-seq-len-interpolation-factor", scaling)
    if is_llama3:  # the other numbers of it cannot be set there
        settings.map(
            ["--use-rope-scaling", "--rope-scaling-factor"],
            {
                "model.rope_scaling.type": "llama3",
                "model.rope_scaling.factor": settings["--rope-scaling-factor"],
                "model.rope_scaling.original_max_positions": 8192,
            },
        )
    settings.ignore("--rope-scaling-factor", "--use-rope-scaling is not given")


def _heads(settings: Settings) -> None:
    heads, width = settings["--num-attention-heads"], settings["--hidden-size"]
    groups = settings["--num-query-groups"] if settings.is_given("--group-query-attention") else heads
    if groups != heads:
        settings.map(_HEADS, {"model.num_kv_heads": groups})
    settings.same(_HEADS, "every head has its own keys and values")
    size = settings["--kv-channels"]
    if size is not None and size * heads != width:
        settings.map("--kv-channels", "model.head_size")
    settings.same("--kv-channels", "hidden-size / heads, as here")
    if settings.is_given("--qk-layernorm"):
        if settings["--normalization"] != "RMSNorm":
            raise ConfigError(
                settings.where, ["--qk-layernorm: queries and keys have an RMSNorm here. Add --normalization RMSNorm."]
            )
        settings.map("--qk-layernorm", {"model.qk_norm": True})


def _biases(settings: Settings, norm: str) -> None:
    if not settings.is_given("--disable-bias-linear"):
        settings.same("--add-qkv-bias", "every matrix has one")
        return
    if norm == "layernorm":
        raise ConfigError(
            settings.where,
            [
                "--disable-bias-linear: with LayerNorm, which keeps its own, it has no key here. Leave it out, or add "
                "--normalization RMSNorm."
            ],
        )
    settings.map(_BIASES, {"model.bias": "qkv" if settings.is_given("--add-qkv-bias") else "none"})


def _feed_forward(settings: Settings) -> None:
    ffn, width = settings["--ffn-hidden-size"], settings["--hidden-size"]
    if settings.is_given("--swiglu"):
        settings.map("--swiglu", {"model.mlp": "swiglu"})
        # Theirs is rounded down to a multiple of 64, ours up.
        ffn = ffn or int(4 * width * 2 / 3) // 64 * 64
    if ffn is not None:
        settings.map("--ffn-hidden-size", {"model.ffn_size": ffn})
    settings.same("--ffn-hidden-size", "empty: four times --hidden-size")


def _window(settings: Settings) -> None:
    """Theirs is how many tokens before and after itself a token sees, such as 4095,0."""
    text = settings["--window-size"]
    if not text:
        settings.same("--window-size", "empty: a token sees all before it")
        return
    try:
        before, after = (int(part) for part in text.strip("() ").split(","))
    except ValueError:
        before, after = -2, -2
    if before < -1 or after not in (0, -1):
        raise ConfigError(settings.where, [f"--window-size: got {text!r}; needs two numbers, such as 4095,0."])
    if before >= 0:
        settings.map("--window-size", {"model.sliding_window": before + 1})
    settings.same("--window-size", "no bound: a token sees all before it")
