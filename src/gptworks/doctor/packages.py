"""Python and the packages, as this installation of gptworks asks for them."""

import platform
import re
import sys
from importlib import metadata

from gptworks.doctor.finding import Finding, note, ok, problem

PYTHONS = (3, 11), (3, 13)  # as requires-python of pyproject.toml, which a test compares
# What each optional extra is for. Those of developers are left out.
EXTRAS = {
    "serve": "gptworks serve, an HTTP server",
    "track": "TensorBoard scalars beside metrics.jsonl",
    "wandb": "runs in Weights & Biases",
    "mlflow": "runs in MLflow",
    "trackio": "runs in Trackio",
    "interop": "Chinese (sentencepiece, jieba), .zst and parquet input",
    "hub": "weights by name from the Hugging Face hub",
    "fast": "faster tokenizing and JSON",
    "eval": "lm-evaluation-harness on our checkpoints",
    "llama": "text from GGUF files by llama.cpp",
    "export": "ONNX and onnxruntime",
    "ctranslate2": "folders for CTranslate2",
}


def python() -> list[Finding]:
    version = platform.python_version()
    first, last = ("{}.{}".format(*each) for each in PYTHONS)
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return problem("python", version, f"Needed: {first} to {last}. Make an environment with it: `make test` does.")
    return ok("python", f"{version} on {platform.system()} {platform.machine()}")


def required() -> list[Finding]:
    """One finding: the versions, or all that do not fit."""
    asked = [each for each in _requirements() if not each.extra]
    if not asked:
        return note("packages", "gptworks runs without being installed, so its needs are unknown", "pip install -e .")
    wrong = [f"{each} is needed, {each.installed or 'none'} is installed" for each in asked if not each.is_met]
    if wrong:
        names = " ".join(f'"{each}"' for each in asked if not each.is_met)
        return problem("packages", "; ".join(wrong), f"pip install {names}")
    return ok("packages", ", ".join(f"{each.name} {each.installed}" for each in asked))


def extras() -> list[Finding]:
    findings: list[Finding] = []
    asked = _requirements()
    for extra, purpose in EXTRAS.items():
        missing = [each.name for each in asked if each.extra == extra and not each.is_met]
        if not any(each.extra == extra for each in asked):
            continue
        if missing:
            missing_for = f"not installed ({', '.join(missing)}): {purpose}"
            findings += note(f"extra {extra}", missing_for, f'Only if wanted: pip install "gptworks[{extra}]"')
        else:
            findings += ok(f"extra {extra}", purpose)
    return findings


class Requirement:
    """Such as 'torch<3,>=2.9' or 'pyarrow>=16; extra == "interop"'.

    >>> each = Requirement('numpy>=1.26,<9; extra == "x"')
    >>> each.name, each.extra, each.allows("1.9"), each.allows("1.26.4"), each.allows("2.0rc1")
    ('numpy', 'x', False, True, True)
    """

    def __init__(self, text: str) -> None:
        wanted, _, condition = text.partition(";")
        extra = re.search(r"extra == ['\"](.+?)['\"]", condition)
        self.extra = extra[1] if extra else ""
        self.text = wanted.strip()
        self.name = re.split(r"[\s<>=!~\[(]", self.text)[0]
        self.bounds = re.findall(r"(>=|<=|==|<|>)\s*([\w.]+)", self.text)

    def __str__(self) -> str:
        return self.text

    @property
    def installed(self) -> str:
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return ""

    @property
    def is_met(self) -> bool:
        return bool(self.installed) and self.allows(self.installed)

    def allows(self, version: str) -> bool:
        have = _numbers(version)
        compare = {
            ">=": lambda wanted: have >= wanted,
            ">": lambda wanted: have > wanted,
            "<=": lambda wanted: have <= wanted,
            "<": lambda wanted: have < wanted,
            "==": lambda wanted: have == wanted,
        }
        return all(compare[sign](_numbers(wanted)) for sign, wanted in self.bounds)


def _numbers(version: str) -> tuple[int, ...]:
    """2.9.1+cpu -> (2, 9, 1); a release candidate counts as its release."""
    digits = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in digits[0].split(".")] if digits else []
    while numbers and not numbers[-1]:
        numbers.pop()  # 2.9.0 is 2.9
    return tuple(numbers)


def _requirements() -> list[Requirement]:
    try:
        return [Requirement(text) for text in metadata.requires("gptworks") or []]
    except metadata.PackageNotFoundError:
        return []
