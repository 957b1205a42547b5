"""Texts of few documents: a share is held out by position; one dataset that has nothing to hold out is no obstacle."""

import json
from pathlib import Path

import pytest

from gptworks.config.schema import DataConfig
from gptworks.counted import counted
from gptworks.data.dataset import Dataset
from gptworks.data.pieces import cut_by_position
from gptworks.data.prepare import PrepareJob, prepare
from gptworks.data.store import Store, is_raw_text, locate_stores
from gptworks.data.text_blocks import TextRules
from gptworks.data.text_files import list_inputs
from gptworks.errors import DataError, EmptySplitError
from gptworks.tokenizer import Tokenizer

USUAL = (949.0, 50.0, 1.0)


def store_of(tmp_path: Path, tokenizer: Tokenizer, documents: int, name: str = "few") -> Path:
    text = tmp_path / f"{name}.txt"
    text.write_text("\n\n".join(f"document {number} " + "Anna found a map. " * 60 for number in range(documents)))
    prepare(PrepareJob([str(text)], tmp_path / name, tokenizer, rules=TextRules(keep_separator=False), append_eod=True))
    return tmp_path / name


@pytest.mark.parametrize("documents", [1, 2, 9])
def test_few_documents_are_cut_by_position(tmp_path: Path, small_tokenizer: Tokenizer, documents: int) -> None:
    prefix = store_of(tmp_path, small_tokenizer, documents)
    before = Store(prefix)
    tokens, identity = before.tokens.tolist(), before.identity
    assert before.num_documents == documents
    assert cut_by_position(prefix, USUAL) == 20
    after = Store(prefix)  # which checks the index against the sidecar
    assert after.num_documents == 20 and after.tokens.tolist() == tokens and after.identity != identity
    assert max(after.contents.sizes) - min(after.contents.sizes) <= 1
    data = Dataset(DataConfig(path=(str(prefix),), seq_len=8), vocab_size=512)
    # The last twentieth is held out, and nothing of it is trained on.
    samples = data.samples("held_out")
    held_out = samples.at(0, samples.per_epoch)
    begin = round(len(tokens) * 19 / 20)
    assert held_out[0].tokens.tolist() == tokens[begin : begin + 9]
    assert samples.per_epoch == (len(tokens) - begin - 1) // 8
    assert data.samples_per_epoch("train") == (begin - 1) // 8


def test_other_shares_and_what_needs_no_cut(tmp_path: Path, small_tokenizer: Tokenizer) -> None:
    one = store_of(tmp_path, small_tokenizer, 1)
    assert cut_by_position(one, (1.0, 0.0, 0.0)) == 0 and cut_by_position(one, ()) == 0
    assert cut_by_position(one, (80.0, 20.0)) == 5
    many = store_of(tmp_path, small_tokenizer, 40, "many")
    identity = Store(many).identity
    assert cut_by_position(many, USUAL) == 0 and Store(many).identity == identity


def test_one_store_without_held_out_documents_does_not_disable_the_others(
    tmp_path: Path, small_tokenizer: Tokenizer, small_store: Path
) -> None:
    one = store_of(tmp_path, small_tokenizer, 1)
    data = Dataset(DataConfig(path=(str(one), str(small_store)), seq_len=8), vocab_size=512)
    alone = Dataset(DataConfig(path=(str(small_store),), seq_len=8), vocab_size=512)
    assert data.samples("held_out").per_epoch == alone.samples("held_out").per_epoch > 0
    (reason,) = data.not_measured("held_out")
    assert reason.startswith(f"{one}.bin: the held_out split has 0 of 1 document and 0 tokens; one sample needs 9. ")
    assert "data.held_out_path" in reason and "--doc-separator" in reason and "data.split" not in reason
    assert alone.not_measured("held_out") == []
    with pytest.raises(EmptySplitError, match="0 of 1 document"):
        Dataset(DataConfig(path=(str(one),), seq_len=8), vocab_size=512).samples("held_out")


def test_a_pattern_of_texts(tmp_path: Path, small_store: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "c.json").write_text(json.dumps([{"text": "c"}]))
    pattern = str(tmp_path / "*.txt")
    assert is_raw_text(pattern) and not is_raw_text(str(tmp_path / "*.md"))
    files, _ = list_inputs([pattern, str(tmp_path / "c.json")])
    assert [Path(each.name).name for each in files] == ["a.txt", "b.txt", "c.json"]
    with pytest.raises(DataError, match=r"\*\.md: no such file"):
        list_inputs([str(tmp_path / "*.md")])
    stores = f"{small_store.parent}/*.bin"
    assert not is_raw_text(stores) and [each.main.stem for each in locate_stores(stores)] == ["small"]


def test_numbers_of_things() -> None:
    assert [counted(number, "step") for number in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
