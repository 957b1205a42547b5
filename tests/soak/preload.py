"""What readers import, imported: for the process whose copies read damaged files."""

import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit"), str(TESTS / "cli")]

MODULES = (
    "gptworks.cli.config",
    "gptworks.cli.main",
    "gptworks.cli.run",
    "gptworks.cli.train",
    "gptworks.train.run",
    "soak.read_mutated",
    "torch._dynamo",
    "torch.distributed.checkpoint",
)
for _module in MODULES:
    importlib.import_module(_module)
