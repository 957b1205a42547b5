"""Generators of the other tests are used again here."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [folder for folder in (str(TESTS), str(TESTS / "unit"), str(TESTS / "cli")) if folder not in sys.path]
