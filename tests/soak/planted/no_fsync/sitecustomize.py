"""A fault to be found: nothing is synced."""

import os

os.fsync = os.fdatasync = lambda descriptor: None
