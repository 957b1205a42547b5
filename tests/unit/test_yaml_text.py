"""YAML as people write it, and what they get wrong."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.config import yaml_text
from gptworks.errors import ConfigError


def read(tmp_path: Path, text: str | bytes) -> dict[str, Any]:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return yaml_text.read(path)


def problem_of(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert caught.value.source == str(tmp_path / "run.yaml")
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-5", -5),
        ("+7", 7),
        ("1_000_000", 1_000_000),
        ("010", 10),  # YAML 1.1 would read eight
        ("08", 8),
        ("0o17", 15),
        ("0x1F", 31),
        ("1:30", "1:30"),  # YAML 1.1 would read ninety
        ("2024-01-01", "2024-01-01"),  # a folder's name, not a date
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("3.", 3.0),
        (".5", 0.5),
        ("-1.5e+3", -1500.0),
        ("1.2.3", "1.2.3"),
        ("1__0", "1__0"),
        ("e5", "e5"),
        ("true", True),
        ("False", False),
        ("on", "on"),
        ("no", "no"),
        ("y", "y"),
        ("null", None),
        ("~", None),
        ("", None),
        ("'12'", "12"),
        ("[a, 1, 2e3]", ["a", 1, 2000.0]),
        ("949,50,1", "949,50,1"),
        ("a: [", "a: ["),  # not YAML: taken as text
        ("!!int x", "!!int x"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    found = yaml_text.parse_scalar(text)
    assert found == value and type(found) is type(value)


def test_special_floats() -> None:
    assert yaml_text.parse_scalar("-.inf") == float("-inf")
    assert yaml_text.parse_scalar(".nan") != yaml_text.parse_scalar(".nan")


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans())
def test_numbers_as_python_prints_them(number: float) -> None:
    text = str(number).lower() if isinstance(number, bool) else repr(number)
    found = yaml_text.parse_scalar(text)
    assert found == number and type(found) is type(number)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=20)
        | st.lists(st.integers(), max_size=3),
        max_size=5,
    )
)
def test_what_is_dumped_is_read_back(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(yaml_text.dump({"section": values}), encoding="utf-8")
    section = yaml_text.read(path)["section"]
    found = section.value or {} if isinstance(section, yaml_text.Value) else {k: v.value for k, v in section.items()}
    assert found == values


def test_dumped_text_keeps_order_and_letters() -> None:
    values = {"run": {"out": "café", "device": "cpu"}, "data": {"split": [949.0, 50.0], "path": []}}
    assert yaml_text.dump(values) == "run: {out: café, device: cpu}\ndata:\n  split: [949.0, 50.0]\n  path: []\n"


def test_every_value_knows_its_line(tmp_path: Path) -> None:
    tree = read(tmp_path, "# a comment\nmodel:\n  num_layers: 2\n\n  tied: true\ndata: {path: x,\n  seq_len: 5}\n")
    assert tree == {
        "model": {"num_layers": yaml_text.Value(2, 3), "tied": yaml_text.Value(True, 5)},
        "data": {"path": yaml_text.Value("x", 6), "seq_len": yaml_text.Value(5, 7)},
    }


def test_windows_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    tree = read(tmp_path, b"\xef\xbb\xbfmodel:\r\n  num_layers: 2\r\n")
    assert tree == {"model": {"num_layers": yaml_text.Value(2, 2)}}


@pytest.mark.parametrize(
    ("text", "line"),
    [("model:\n\tnum_layers: 2\n", 2), ("model:\n  num_layers: 2\n\ttied: true\n", 3), ("a:\n  b:\t2\n", 2)],
)
def test_a_tab(text: str, line: int, tmp_path: Path) -> None:
    problem = problem_of(tmp_path, text)
    assert problem.startswith(f"line {line}, column ")
    assert "tab" in problem and "Replace the tab with spaces" in problem


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("model:\n  tied: true\n  tied: false\n", ("tied", 2), 3),
        ("model: {tied: true}\noptim: {lr: 1}\nmodel: {tied: false}\n", ("model", 1), 3),
        ("a:\n  b:\n    c: 1\n    'c': 2\n", ("c", 3), 4),
    ],
)
def test_a_key_twice(text: str, first: tuple[str, int], second: int, tmp_path: Path) -> None:
    name, line = first
    assert problem_of(tmp_path, text) == (
        f"line {second}: key '{name}' again; it is already set on line {line}. Keep one."
    )


def test_the_same_key_in_two_sections_is_fine(tmp_path: Path) -> None:
    assert read(tmp_path, "evaluate: {every: 1}\ncheckpoint: {every: 2}\n")["checkpoint"]["every"].value == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n- b\n", "line 1: needs `section:` blocks at the top level."),
        ("\n\njust words\n", "line 3: needs `section:` blocks at the top level."),
        ("model: [1, 2\n", "line 2, column 1: not valid YAML: expected ',' or ']'"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: not valid YAML: but found another document"),
        ("model:\n  x: !!python/object/apply:os.system ['true']\n", "line 2, column 6: not valid YAML: could not"),
        ("model:\n  x: !!int twelve\n", "not valid YAML: invalid literal for int() with base 10: 'twelve'"),
        ("a: *nobody\n", "line 1, column 4: not valid YAML: found undefined alias"),
        ("model:\n  x: 1\n  y: \x01\n", "line 3: the control character U+0001. Remove it."),
        ("\x00", "line 1: the control character U+0000. Remove it."),
        ("model: &m\n  x: *m\n", "line 1: blocks are nested without end"),
        ("a: " + "[" * 1500 + "]" * 1500, "blocks are nested without end"),
        (b"model: \xff\n", "cannot be read as UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 7"),
    ],
)
def test_what_is_not_yaml_is_located(text: str | bytes, expected: str, tmp_path: Path) -> None:
    assert problem_of(tmp_path, text).startswith(expected)


@given(
    st.binary(max_size=60) | st.text("ab:-[]{}&*!?|>%@`'\"\t\n 1.#,<=~", max_size=60).map(lambda text: text.encode())
)
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    try:
        assert isinstance(yaml_text.read(path), dict)
    except ConfigError as error:
        assert str(path) in str(error) and len(error.problems) == 1


MERGED = """\
model: &small
  num_layers: 2
  hidden_size: 32
optim: &rates {lr: 0.1, clip: 2.0}
train:
  steps: 3
  <<: [*rates, *small]
  num_layers: 9
  lr: 0.5
"""


@pytest.mark.parametrize("value", ["9" * 5000, "2024-13-45"])
def test_a_number_or_date_that_is_none_in_yaml_of_others(value: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"steps: {value}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a\.yaml: 1 problem\n  not valid YAML: (.*4300 digits|month must be in)"):
        yaml_text.read_plain(tmp_path / "a.yaml")


def test_merge_keys_bring_in_a_block_below_its_own_keys(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(MERGED)
    found = yaml_text.read(path)
    train = {key: (leaf.value, leaf.line) for key, leaf in found["train"].items()}
    assert train == {"steps": (3, 6), "lr": (0.5, 9), "clip": (2.0, 4), "num_layers": (9, 8), "hidden_size": (32, 3)}
    # An independent reader has the same values, but for 0.1 and the like, which are the same here.
    import yaml

    assert {key: value for key, (value, _) in train.items()} == yaml.safe_load(MERGED)["train"]


@pytest.mark.parametrize("value", ["3", "[1, 2]", "text", "[{a: 1}, 5]"])
def test_a_merge_key_with_anything_else_is_refused(value: str, tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(f"model:\n  <<: {value}\n")
    with pytest.raises(ConfigError, match="line 2: `<<` needs a block") as caught:
        yaml_text.read(path)
    assert str(path) in str(caught.value)


def test_a_merge_key_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("model: &m {num_layers: 2}\ntrain:\n  <<: *m\n  <<: *m\n")
    with pytest.raises(ConfigError, match="line 4: key '<<' again"):
        yaml_text.read(path)
