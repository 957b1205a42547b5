"""Windows: nobody here has one, so a process that lacks what Windows lacks stands for it."""

import subprocess
import sys
from pathlib import Path

import pytest

# All modules are imported once as they are, so that libraries are there, and once more on what is left of the system.
IMPORT_EVERYTHING = """
import importlib, os, pkgutil, signal, sys

import gptworks

NAMES = [m.name for m in pkgutil.walk_packages(gptworks.__path__, "gptworks.") if not m.name.endswith("__main__")]
POSIX = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "posix", "_posixsubprocess"}
FUNCTIONS = [
    "fork", "forkpty", "sched_getaffinity", "sched_setaffinity", "register_at_fork", "setsid", "getsid", "killpg",
    "getpgid", "setpgid", "getuid", "geteuid", "getgid", "getegid", "getloadavg", "sysconf", "uname", "waitid", "wait3",
    "wait4", "WNOHANG", "WNOWAIT", "WEXITED", "P_PID", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "pread", "preadv",
    "pwrite", "mkfifo", "fchmod", "fchown", "chown", "statvfs", "nice", "ttyname", "openpty", "posix_fallocate",
    "posix_fadvise", "sendfile", "memfd_create", "WIFSIGNALED", "WTERMSIG",
]
SIGNALS = ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGCHLD", "SIGALRM", "SIGPIPE", "SIGCONT", "SIGSTOP", "SIGQUIT"]


def import_all():
    failed = {}
    for name in NAMES:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in POSIX:
            raise ModuleNotFoundError(f"No module named {name!r} (not on this system)", name=name)


before = import_all()
for name in [name for name in sys.modules if name.split(".")[0] == "gptworks"] + sorted(POSIX):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
for name in FUNCTIONS:
    if hasattr(os, name):
        delattr(os, name)
for name in SIGNALS:
    delattr(signal, name)
sys.platform = "win32"
assert not hasattr(os, "fork") and not hasattr(signal, "SIGKILL")
after = import_all()
for name in NAMES:
    if name in after and name not in before:
        print(name, after[name])
print(len(NAMES), "modules;", len(before), "need what is not installed")

from gptworks.cli.main import VERBS, main

for verb in VERBS:
    try:
        main([verb, "--help"])
    except SystemExit as end:
        assert end.code == 0, verb
print("parsed", *VERBS)
print("two processes", main(["train", "-c", sys.argv[1], "--out", sys.argv[2], "parallel.dp=2"]))
"""


@pytest.mark.slow
def test_every_module_and_every_verb_is_there_without_what_only_posix_has(recipe: Path, tmp_path: Path) -> None:
    """Training in several processes is refused with what is missing."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_EVERYTHING, str(recipe), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    number = int(next(line for line in lines if "modules;" in line).split()[0])
    assert number > 200
    assert lines[0].startswith(f"{number} modules;"), done.stdout
    (parsed,) = (line for line in lines if line.startswith("parsed "))
    assert " train " in f"{parsed} "
    assert lines[-1] == "two processes 2" and not (tmp_path / "run").exists()
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: 2 processes: win32 lacks the signals") and "in WSL" in last
