"""CSV and TSV as `prepare` reads them: quoting, byte order marks, delimiters, and mistakes with their lines."""

import csv
import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.data import corpus, text_blocks
from gptworks.data.text_blocks import TextRules
from gptworks.errors import DataError

LETTERS = st.text(st.sampled_from("ab\"',;\t|\n é你"), max_size=12)


def documents(file: Path, *keys: str, kind: str = "auto", strict: bool = False) -> tuple[list[str], list[str]]:
    skipped = corpus.Skipped(strict)
    rules = TextRules(keys or ("text",), kind=kind)
    found = [text for each in corpus.read_documents([str(file)], rules, skipped) for text in each]
    return found, [line.replace(str(file.parent) + "/", "") for line in skipped.first]


@given(rows=st.lists(st.tuples(LETTERS, LETTERS), min_size=1, max_size=8), delimiter=st.sampled_from(",;\t|"))
def test_what_pythons_writer_writes_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], delimiter: str
) -> None:
    file = tmp_path_factory.mktemp("t") / "a.csv"
    with file.open("w", encoding="utf-8-sig", newline="") as opened:
        writer = csv.writer(opened, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writerows([("title", "text"), *rows])
    assert documents(file) == ([text for _, text in rows], [])
    assert documents(file, "title") == ([title for title, _ in rows], [])


def test_a_small_table_by_hand(tmp_path: Path) -> None:
    """Against the rules of RFC 4180, as somebody would read them."""
    table = '\ufefftitle,text,stars\r\nSoup,"Cut the onion.\r\nCook, then say ""done"".",3\r\n\r\nCake, Bake it ,5\r\n'
    file = tmp_path / "recipes.csv"
    file.write_bytes(table.encode())
    assert documents(file) == (['Cut the onion.\nCook, then say "done".', " Bake it "], [])
    assert documents(file, "title") == (["Soup", "Cake"], [])  # behind the byte order mark
    zipped = tmp_path / "recipes.csv.gz"
    zipped.write_bytes(gzip.compress(table.encode()))
    assert documents(zipped) == documents(file)
    (tmp_path / "t.tsv").write_bytes(b"text\tn\nA, b\t1\n")
    assert documents(tmp_path / "t.tsv") == (["A, b"], [])
    (tmp_path / "data").write_bytes(b"text\tn\nA, b\t1\n")
    assert documents(tmp_path / "data", kind="tsv") == (["A, b"], [])


def test_bad_rows_are_named_by_their_line(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b'n,text\n1,"two\nlines"\n2\n3,"a"b\n4,caf\xe9\n5,good\n6,a,b\n')
    assert documents(file) == (
        ["two\nlines", "good"],
        [
            "a.csv:4: 1 fields, the header has 2",
            "a.csv:5: not a row of a table (',' expected after '\"')",
            "a.csv:6: not UTF-8 text (byte 0xe9)",
            "a.csv:8: 3 fields, the header has 2",
        ],
    )
    with pytest.raises(DataError, match=r"a\.csv:4: 1 fields"):
        documents(file, strict=True)


def test_lines_are_counted_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 10)
    file = tmp_path / "a.csv"
    file.write_text("text,n\n" + '"line one\nline two",1\n' * 5 + "bad\n" + "good one,2\n" * 3, encoding="utf-8")
    found, said = documents(file)
    assert found == ["line one\nline two"] * 5 + ["good one"] * 3
    assert said == ["a.csv:12: 1 fields, the header has 2"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "a.csv: no header"),
        (b"\n\n", "a.csv: no header"),
        (b"title,body\n1,2\n", r"a\.csv:1: no column 'text'\. Columns: title, body\. Choose one with --key"),
        (b"title;body\n1,2\n", r"a\.csv:1: no column 'text'\. Columns: title, body"),
        (b"\n\ntext,text\n1,2\n", r"a\.csv:3: 2 columns are named 'text'"),
        (b'text,n\na,1\n"open,2\nb,3\n', r"a\.csv:3: a quote \(\"\) opens here .* end of the file \(line 4\)"),
        (b'"text,n\na,1\n', r"a\.csv:1: a quote \(\"\) opens here"),
        (b'"te"xt,n\na,1\n', r"a\.csv:1: the header is not a row of a table"),
        (b"te\rxt,n\na,1\n", r"a\.csv:1: the header is not a row of a table \(new-line character"),
        ("text\n1\n".encode("utf-16"), "a.csv: is in UTF-16"),
    ],
)
def test_a_table_that_cannot_be_read(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=said):
        documents(tmp_path / "a.csv")


def test_long_fields_and_the_limit_of_others(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"text\n{'x' * 300_000}\n", encoding="utf-8")
    assert len(documents(tmp_path / "a.csv")[0][0]) == 300_000
    assert csv.field_size_limit() == before == 131072
    with pytest.raises(csv.Error, match="field larger"):
        list(csv.reader(io.StringIO("x" * 300_000)))


@pytest.mark.parametrize("line", [1, 3])
def test_a_line_longer_than_a_document_may_be(line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit it is read, and one byte more is refused with the number that lets it through."""
    monkeypatch.setenv("GPTWORKS_MAX_DOCUMENT_BYTES", "1000")
    rows = ["text", "a", "b"]
    rows[line - 1] = rows[line - 1].ljust(999, "x") if line > 1 else f"text,{'x' * 994}"
    after = [f"{row},1" if line == 1 and row != rows[0] else row for row in rows]
    (tmp_path / "a.csv").write_text("\n".join(after) + "\n", encoding="utf-8")
    assert len(documents(tmp_path / "a.csv")[0]) == 2
    after[line - 1] += "x"
    (tmp_path / "a.csv").write_text("\n".join(after) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"a\.csv: line {line} has more than 1,000 bytes") as caught:
        documents(tmp_path / "a.csv")
    setting = str(caught.value).partition("variable ")[2].strip().rstrip(".")
    monkeypatch.setenv(*setting.split("="))
    assert len(documents(tmp_path / "a.csv")[0]) == 2
