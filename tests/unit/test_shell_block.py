"""The reader of shell blocks against a real bash: the same programs, with the same words, in the same folders."""

import os
import shutil
import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptworks.errors import UsageError
from gptworks.interop import pasted, shell_block

BASH = shutil.which("bash")
# A program that writes down how it was started, put in the place of python on the path of the real shell.
RECORDER = r"""#!/bin/sh
{
    for word in "$@"; do printf 'word=%s\0' "$word"; done
    printf 'folder=%s\0' "$(pwd)"
    for name in A B C MB task_name LIST; do
        eval "value=\${$name-not set}"
        [ "$value" = "not set" ] || printf 'name=%s=%s\0' "$name" "$value"
    done
    printf 'end\0'
} >> "$RECORD"
"""
NAMES = ["A", "B", "C", "MB", "task_name", "LIST"]


def by_ours(block: str, folder: Path, arguments: tuple[str, ...] = ()) -> list:
    environment = {"HOME": str(folder)}
    found = shell_block.commands(block, "block", environment, folder, find, arguments)
    return [
        [each.words[1:], str(each.folder.absolute()), {n: v for n, v in each.environment.items() if n in NAMES}]
        for each in found
        if each.words[0] == "python"
    ]


def find(name: str, folder: Path) -> Path | None:
    return folder / name if (folder / name).is_file() else None


def by_bash(block: str, folder: Path, arguments: tuple[str, ...] = ()) -> list:
    programs, record = folder / ".programs", folder / ".record"
    programs.mkdir(exist_ok=True)
    program = programs / "python"
    program.write_text(RECORDER)
    program.chmod(0o755)
    record.write_text("")
    environment = {"HOME": str(folder), "PATH": f"{programs}:/usr/bin:/bin", "RECORD": str(record)}
    subprocess.run([BASH, "-c", block, "block", *arguments], cwd=folder, env=environment, check=True, timeout=60)
    return [_recorded(text.split("\0")) for text in record.read_text().split("\0end\0")[:-1]]


def _recorded(entries: list[str]) -> list:
    kinds = [entry.partition("=")[::2] for entry in entries]
    words = [text for kind, text in kinds if kind == "word"]
    (folder,) = (text for kind, text in kinds if kind == "folder")
    return [words, folder, dict(text.split("=", 1) for kind, text in kinds if kind == "name")]


BLOCKS = {
    "comments and continuation": 'python a.py --x 1 \\\n   --y "./data"\\\n --z 3 # the end\n# python b.py',
    "quotes": "A=1\npython 'single $A' \"double $A\" \\$A a\"b\"'c' \"\" '#no'",
    "assignments": 'A="a b"\nB=$A\nA+=" c"\npython $A "$A" $B',
    "in front": "export C=7\nA=1 B='x y' python z",
    "defaults": 'MB=\npython ${MB:-4} ${A:-"a b"} ${A-z} "${A:-a  b}" ${MB-none} end',
    "arithmetic": 'MB=7\npython $((MB*2)) $(( ($MB + 1) / 3 )) $((-7/2)) $((-7%3)) $((2**5)) "$((MB-1))x"',
    "folders": "mkdir -p x/y\ncd x && cd y\npython $(pwd) $PWD `pwd`\ncd ../..\npython $(pwd)",
    "parts of paths": "mkdir x\npython $(basename a/b.sh .sh) $(dirname a/b/c) $(dirname c) $(cd x/.. && pwd)",
    "loop": "for A in 1 2 'x y' {5..7} v{a,b}; do\n  python $A \"$A\"\ndone\npython $A",
    "nested": "for A in 1 2; do for B in a b; do if [ $A = 1 ]; then python $A$B; else python no $B; fi; done; done",
    "tests": (
        'A=5\nif [ "$A" -gt 4 ] && [ -n "$A" ]; then python gt; fi\nif [ ! -z "$B" ]; then python set; '
        'elif [ -f nothing ]; then python file; else python neither; fi\n[ "$A" = 5 ] && python five\n'
        '[ "$A" != 5 ] || python or\nif [[ $A == 5 && ! -d nothing ]]; then python both; fi'
    ),
    "arrays": 'LIST=( --x 1\n  --y "a b" )\nLIST+=(--z 3)\npython "${LIST[@]}" ${LIST[@]} "${LIST[*]}" ${LIST[1]}',
    "command in a name": 'A="python -m b"\nA+=" --k v"\n${A} --more [0,8]',
    "semicolons": "export A=1; export B=2; python $A$B; python x",
    "words of a script": 'python "$1" $# "$@" ${2:-none}',
    "env": "env A=3 B=x python q",
    "unset": 'A=1\nunset A\nif [ -z "$A" ]; then python gone; fi',
    "exit": "python one\nexit 0\npython two",
    "file names": "touch f1.txt f2.txt\npython *.txt f?.txt '*.txt' none*.md",
    "redirections": "python a > log.txt 2>&1\npython b >> log.txt\npython c 2> err.txt < /dev/null",
    "tee": "python a | tee log.txt\npython b 2>&1 | tee -a log.txt",
    "empty words": 'A=\nB="x"\npython "$A" $B "" ${A:+no} ${B:+yes}',
    "set": "set -ex\npython a\nset +x",
    "or exit": "python a || exit 1\npython b",
    "inner quotes": "python --cmd \"python x --y 'a b' \\\n   --z\"",
    "declared": 'B="x y"\nexport A=$B C=$UNSET:z LIST\nLIST=~/w\nexport LIST2=~/v\npython "$A" $C "$LIST" "$LIST2"',
    "readonly": "readonly A=1\npython $A",
    "the other test": 'A=5\ntest $A -gt 4 && python gt\nif test -z "$B"; then python none; fi\ntest -d no || python or',
    "pipes of both": "python a |& tee log.txt\npython b 2>&1 |\n  tee -a log.txt",
    "home": "python ~/x ~ a~b '~/y'",
}


@pytest.mark.skipif(BASH is None, reason="no bash to compare with")
@pytest.mark.parametrize("name", BLOCKS)
def test_starts_what_bash_starts(name: str, tmp_path: Path) -> None:
    block = BLOCKS[name]
    started = by_bash(block, tmp_path, ("first word", "second"))
    assert started
    assert by_ours(block, tmp_path, ("first word", "second")) == started


_plain = st.text(string.ascii_letters + string.digits + "./-_=,:+@%", min_size=1, max_size=8).filter(
    lambda text: not text.startswith(("-", "=")) and "~" not in text and text not in ("exit", "in")
)
_name = st.sampled_from(NAMES[:4])
_piece = st.one_of(
    _plain,
    st.builds("${{{}:-{}}}".format, _name, _plain),
    st.builds('"{} ${{{}:-x y}}"'.format, _plain, _name),
    st.builds("'{} $A'".format, _plain),
    st.builds("$(({}*{}+1))".format, st.integers(0, 99), st.integers(0, 9)),
    st.just("$(pwd)"),
    st.just("\\$A"),
)
_word = st.lists(_piece, min_size=1, max_size=3).map("".join)
_value = st.one_of(_plain, st.builds('"{} {}"'.format, _plain, _plain), st.integers(0, 50).map(str))
_program = st.lists(_word, min_size=1, max_size=4).map(lambda words: "python " + " ".join(words))
_line = st.one_of(
    _program,
    st.builds("{}={}".format, _name, _value),
    st.builds("export {}={}".format, _name, _value),
    st.builds("{}={} {}".format, _name, _value, _program),
    st.builds("for {} in {} {}; do {}; done".format, _name, _word, _plain, _program),
    st.builds('if [ "${{{}:-}}" = {} ]; then {}; else {}; fi'.format, _name, _plain, _program, _program),
    st.builds("{} > log 2>&1".format, _program),
    st.builds("{} # {}".format, _program, _plain),
    st.builds("{} \\\n  {}".format, _program, _word),
)


@pytest.mark.skipif(BASH is None, reason="no bash to compare with")
@settings(max_examples=25, deadline=None)
@given(lines=st.lists(_line, min_size=1, max_size=6))
def test_any_block_starts_what_bash_starts(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("block")
    block = "\n".join(lines)
    assert by_ours(block, folder) == by_bash(block, folder)
    assert by_ours(block.replace("\n", "\r\n"), folder) == by_ours(block, folder)
    with_prompts = "\n".join(f"$ {line}" for line in lines if "\n" not in line)
    without = "\n".join(line for line in lines if "\n" not in line)
    assert by_ours(with_prompts, folder) == by_ours(without, folder)


@pytest.mark.parametrize(
    ("block", "what", "line"),
    [
        ("python a\nwhile true; do python b; done", "a while loop", 2),
        ("python a\n\ncase $A in x) python b;; esac", "a case", 3),
        ("python $(whoami)", "$(whoami)", 1),
        ("python a\npython `rm -rf x`", "$(rm -rf x)", 2),
        ("python a | grep b", "a pipe into anything but tee", 1),
        ("f() { python a; }", "a function", 1),
        ("(cd x; python a)", "a subshell", 1),
        ("cat <<EOF\nx\nEOF", "<<", 1),
        ("python a\nif grep x y; then python b; fi", "an if whose condition is a command", 2),
        ("for ((i=0; i<3; i++)); do python $i; done", "((", 1),
        ("eval python a", "eval", 1),
        ("python ${A##*/}", "${A##*/}", 1),
        ("python $[1+2]", "$[...]", 1),
        ('python $"x"', '$"..."', 1),
        ("python a\nfor A in 1 2; do python $A; done > log", "> behind done", 2),
        ("if [ -f x ]; then python a; fi | tee log", "| behind fi", 1),
        ("> log\npython a", "> without a command", 1),
        ("python a < text", "< (text", 1),
        ("export -f A\npython a", "export -f", 1),
    ],
)
def test_what_is_not_read_is_named_with_its_line(block: str, what: str, line: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        list(shell_block.commands(block, "block", {}, tmp_path, find))
    assert what in str(refused.value)
    assert f"line {line}" in str(refused.value)


def test_a_script_with_a_byte_that_no_name_may_have(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_bytes(b"cd .\npython tr\0ain.py --lr 1\n")
    with pytest.raises(UsageError, match=r"a\.sh, line 2: a NUL byte"):
        list(pasted.lines([str(tmp_path / "a.sh")], {}, tmp_path))


def test_nothing_is_given_out_before_all_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 3: a while loop"):
        shell_block.commands("python a\npython b\nwhile true; do python c; done", "block", {}, tmp_path, find)


@pytest.mark.parametrize(
    ("inside", "what"),
    [
        ("python $(whoami)", "$(whoami)"),
        ("python ${A##*/}", "${A##*/}"),
        ("python ${A:-$(whoami)}", "$(whoami)"),
        ("python a > $(date)", "$(date)"),
        ("A=$(pwd; date)", "$(pwd; date)"),
        ("python a || python b", "|| behind a command"),
        ("echo $?", "$?"),
    ],
)
def test_a_branch_that_is_not_taken_is_read_too(inside: str, what: str, tmp_path: Path) -> None:
    """It may be taken when the commands before it have run."""
    for block in (f"python a\nif [ -d made ]; then\n{inside}\nfi", f"python a\nfor B in ; do\n\n{inside}; done"):
        with pytest.raises(UsageError) as refused:
            shell_block.commands(block, "block", {}, tmp_path, find)
        assert what in str(refused.value) and "line " in str(refused.value)


def test_an_unset_name_in_a_command_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"block, line 2: \$task_name is not set. Set it \(export task_name=...\)"):
        list(shell_block.commands("A=1\npython --out output/$task_name", "block", {}, tmp_path, find))


def test_prompts_of_terminals(tmp_path: Path) -> None:
    block = "(venv) me@host:~/gpt$ python a.py --x 1 \\\n> --y 2\n$ python b.py\n"
    assert [started[0] for started in by_ours(block, tmp_path)] == [["a.py", "--x", "1", "--y", "2"], ["b.py"]]


@pytest.mark.parametrize(
    "prompt",
    ["[root@node1 gpt]# ", "root@f3a2:/workspace# ", "(base) [me@login ~]$ ", "  $ ", "bash-4.2$ ", "sh-5.1# "],
)
def test_prompts_of_other_terminals(prompt: str, tmp_path: Path) -> None:
    block = f"{prompt}python a.py --x 1\n# {prompt}python no.py\n{prompt}python b.py\n"
    assert [started[0] for started in by_ours(block, tmp_path)] == [["a.py", "--x", "1"], ["b.py"]]


def test_what_looks_like_a_blank_is_one(tmp_path: Path) -> None:
    """As pages have it, in the place of a blank and at the end of a line that goes on; not between quotes."""
    block = "\ufeffpython a.py\u00a0--x\u30001 \\\u00a0\n\u3000--y '\u3000'"
    assert [started[0] for started in by_ours(block, tmp_path)] == [["a.py", "--x", "1", "--y", "\u3000"]]


def test_a_file_that_sets_up_a_shell_is_left_to_the_caller(tmp_path: Path) -> None:
    block = "source venv/bin/activate\n. ~/.bashrc\nsource /usr/local/Ascend/ascend-toolkit/set_env.sh\npython a"
    found = shell_block.commands(block, "block", {"HOME": "/home/me"}, tmp_path, find)
    assert [each.words[0] for each in found] == ["source", ".", "source", "python"]
    with pytest.raises(UsageError, match=r"line 1: settings.sh: no such file in "):
        list(shell_block.commands("source settings.sh\npython a", "block", {}, tmp_path, find))


def test_scripts_that_call_scripts(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "outer.sh").write_text(
        "#!/bin/bash\nexport A=${A:-1}\nB=own\nsource $(dirname $0)/inner.sh --k\nbash scripts/last.sh x\n"
    )
    (tmp_path / "scripts" / "inner.sh").write_text('python inner "$1" $A $B\nC=kept\n')
    (tmp_path / "scripts" / "last.sh").write_text('if [ -z "$B" ]; then python last $1 $A; fi\n')
    block = "A=5 bash scripts/outer.sh > log"
    assert by_ours(block, tmp_path) == by_bash(block, tmp_path)
    found = list(shell_block.commands(f"{block} 2>&1", "block", {}, tmp_path, find))
    assert [(each.output, each.errors_too) for each in found] == [("log", True)] * 2
    assert [each.appends for each in found] == [False, True]  # or the second would wipe out the first


def test_what_a_started_program_writes_goes_where_the_block_says(tmp_path: Path) -> None:
    block = "python a > log 2>&1\npython b | tee -a both.log\nnohup python c &\ntime python d"
    quiet, both, behind, timed = shell_block.commands(block, "block", {}, tmp_path, find)
    assert (quiet.output, quiet.on_screen, quiet.errors_too, quiet.appends) == ("log", False, True, False)
    assert (both.output, both.on_screen, both.appends) == ("both.log", True, True)
    assert "nohup" in behind.remarks[0] and "&" in behind.remarks[1]
    assert "time" in timed.remarks[0]


@pytest.mark.parametrize(
    ("redirections", "output", "errors_too", "errors"),
    [
        ("> log 2> err", "log", False, "err"),
        ("2>> err", "", False, "err"),
        ("2>&1 > log", "log", False, ""),  # errors go where the output went before
        ("> log 2>&1", "log", True, ""),
        ("&> log", "log", True, ""),
    ],
)
def test_where_errors_go(redirections: str, output: str, errors_too: bool, errors: str, tmp_path: Path) -> None:
    (found,) = shell_block.commands(f"python a {redirections}", "block", {}, tmp_path, find)
    assert (found.output, found.errors_too, found.errors) == (output, errors_too, errors)
    assert found.appends_errors == (">>" in redirections)
    with pytest.raises(UsageError, match=r"\$OUT is not set"):
        list(shell_block.commands("python a > $OUT/log", "block", {}, tmp_path, find))


def test_words_that_a_shell_has_cut_are_not_looked_up_again(tmp_path: Path) -> None:
    words = ["A=1", "nohup", "python", "a b", "$B", "*"]
    (started,) = shell_block.of_words(words, dict(os.environ), tmp_path, find)
    assert started.words == ["python", "a b", "$B", "*"]
    assert started.environment == {"A": "1"}
