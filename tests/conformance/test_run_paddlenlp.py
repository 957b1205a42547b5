"""The commands of PaddleNLP's GPT document and of its GPT-3 document, as they are written there."""

import itertools
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import foreign_runs as foreign
import numpy as np
import pytest
import torch
import zstandard
from home_folder import own_home

import gptworks
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.systems import registry as systems
from gptworks.cli.main import main
from gptworks.doctor.finding import Finding
from gptworks.errors import ConfigError, UsageError
from gptworks.evaluate.tasks.wikitext import detokenize
from gptworks.interop import command_line, paddlenlp, registry
from gptworks.interop.translation import Translation
from gptworks.tokenizer import Tokenizer

PREPARE = """python -u  create_pretraining_data.py \\
    --model_name gpt2-en \\
    --tokenizer_name GPTTokenizer \\
    --data_format JSON \\
    --input_path /path/to/openwebtext/ \\
    --append_eos \\
    --output_prefix gpt_openwebtext  \\
    --workers 40 \\
    --log_interval 10000"""
TRAIN = """CUDA_VISIBLE_DEVICES=0 python run_pretrain.py \\
    --model_type gpt \\
    --model_name_or_path gpt2-en \\
    --input_dir "./data"\\
    --output_dir "output"\\
    --weight_decay 0.01\\
    --grad_clip 1.0\\
    --max_steps 500000\\
    --save_steps 100000\\
    --decay_steps 320000\\
    --warmup_rate 0.01\\
    --micro_batch_size 4\\
    --device gpu"""
HYBRID = """python -u  -m paddle.distributed.fleet.launch \\
    --gpus "0,1,2,3,4,5,6,7" \\
    --log_dir "output/$task_name/log" run_pretrain_static.py \\
    --model_type "gpt" \\
    --model_name_or_path "gpt2-en" \\
    --input_dir "./data" \\
    --output_dir "output/$task_name" \\
    --max_seq_len 1024 \\
    --micro_batch_size 8 \\
    --global_batch_size 32 \\
    --sharding_degree 4\\
    --mp_degree 2 \\
    --dp_degree 1 \\
    --pp_degree 1 \\
    --use_sharding true \\
    --use_amp true \\
    --use_recompute true \\
    --max_lr 0.00015 \\
    --min_lr 0.00001 \\
    --max_steps 500000 \\
    --save_steps 100000 \\
    --decay_steps 320000 \\
    --weight_decay 0.01\\
    --warmup_rate 0.01 \\
    --grad_clip 1.0 \\
    --logging_freq 1\\
    --eval_freq 10000 \\
    --device "gpu"
"""
WIKITEXT = """python run_eval.py --model_name gpt2-en \\
    --eval_path ./wikitext-103/wiki.valid.tokens \\
    --overlapping_eval 32 \\
    --init_checkpoint_path ./output/model_1000/model_state.pdparams \\
    --batch_size 8 \\
    --device gpu"""
LAMBADA = """python run_eval.py --model_name gpt2-en \\
    --eval_path ./lambada_test.jsonl \\
    --cloze_eval \\
    --init_checkpoint_path ./output/model_1000/model_state.pdparams \\
    --batch_size 8 \\
    --device gpu"""
LAMBADA_BY_NAME = LAMBADA.replace("--init_checkpoint_path ./output/model_1000/model_state.pdparams \\\n    ", "")
EXPORT = """python export_model.py --model_type=gpt \\
    --model_path=gpt2-en \\
    --output_path=./infer_model/model"""
INFER = """python deploy/python/inference.py --model_type gpt \\
    --model_path ./infer_model/model"""
COMMANDS = [PREPARE, TRAIN, HYBRID, WIKITEXT, LAMBADA, LAMBADA_BY_NAME, EXPORT, INFER]
PASSAGES = [
    "The keeper lit the lamp at dusk. All night the ships saw the light of the lamp",
    "She had lost her key again. Under the mat there was always a second key",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a command is run: in ./data a corpus of small ids, as Paddle's tools write it."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 500, length) for length in draw.integers(30, 200, size=60)]
    foreign.paddle_pair(tmp_path / "data/gpt_en_dataset_300m", documents)
    return tmp_path


def run(folder: Path, command: str, *, verb: str = "run", extra: tuple[str, ...] = ()) -> int:
    return main([verb, "--device", "cpu", "--shrink", "tiny", *extra, "--cwd", str(folder), "--", command])


def losses(run_folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def translated(command: str, folder: Path = Path()) -> Translation:
    split = command_line.split([command], {"task_name": "gpt3"}, folder)
    return paddlenlp.translate(split, None)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.findall(r"\w+\.py", command)[0])
def test_every_flag_of_the_command_has_one_note(command: str) -> None:
    found = translated(command)
    written = re.findall(r"(?<![\w-])--\w+", command)
    assert sorted(note.theirs for note in found.notes) == sorted(written)
    assert all(note.why for note in found.notes if not note.ours)


def test_s2_03_s2_04_s2_06_the_single_card_command_trains_as_its_translation_does(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = TRAIN + " --max_steps 3"
    assert run(folder, command) == 0
    assert "learning rate: 6.25000e-08" in capsys.readouterr().out  # 1e-4 x 2 / 3200
    for name in ("model_state.pdparams", "model_config.json"):
        assert (folder / "output/model_3" / name).is_file()
    assert run(folder, command, verb="translate") == 0
    (folder / "ours.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    monkeypatch.chdir(folder)
    assert main(["train", "-c", "ours.yaml", "--out", "again"]) == 0
    assert len(losses(folder / "output")) == 3
    assert losses(folder / "output") == losses(folder / "again")
    # A folder instead of a name: its weights are trained further, and its shape needs no preset.
    more = TRAIN.replace("gpt2-en", "./output/model_3").replace('"output"', '"further"') + " --max_steps 3"
    assert run(folder, more) == 0
    assert losses(folder / "further")[0] < losses(folder / "output")[0]


@pytest.mark.slow
def test_x_01_s2_05_s3_01_s3_04_s3_06_the_gpt3_document_with_eight_processes(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old data and `sh run.sh`: mp 2 x sharding 4, amp, recompute. Three steps: eight processes share few cores."""
    with_old_data(folder)
    monkeypatch.setenv("task_name", "gpt3")
    command = HYBRID.strip() + " --max_steps 3"
    (folder / "run.sh").write_text(f"#!/bin/sh\nset -x\n{command}\n", encoding="utf-8")
    assert run(folder, "sh run.sh") == 0
    out = folder / "output/gpt3"
    assert sorted(path.name for path in (out / "log").iterdir()) == [f"workerlog.{rank}" for rank in range(8)]
    opened = systems.open_any(out / "model_3", {})
    assert opened.model.vocab_size == 50304  # as theirs: no rows more for mp 2
    assert "global step 3" in (out / "log/workerlog.0").read_text()
    assert run(folder, command, verb="translate") == 0
    text = "# Translated" + capfd.readouterr().out.rpartition("# Translated")[2]
    (folder / "ours.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    assert main(["train", "-c", "ours.yaml", "--out", "again"]) == 0
    assert len(losses(out)) == 3
    assert losses(out) == losses(folder / "again")


def test_s3_02_degrees_that_are_not_the_devices_and_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mp_degree 2 x sharding_degree 4 x pp_degree 1 x dp_degree 2 = 16, but 8"):
        translated(HYBRID.strip() + " --dp_degree 2")
    with pytest.raises(ConfigError, match="32 is not micro_batch_size 3 x sharding_degree 4 x dp_degree 1"):
        translated(HYBRID.strip() + " --micro_batch_size 3")
    found = translated(HYBRID.strip() + " --global_batch_size 64")  # accumulation makes up for it
    assert (found.config["batch.global_size"], found.config["batch.micro_size"]) == (64, 8)


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        ("--use_sharding true --sharding_stage 3", "parallel.zero", 3),
        ("--sharding_stage 2 --sharding_offload true", "parallel.offload", True),
        ("--to_static true", "train.compile", True),
        ("--use_amp false", "precision.compute", "fp32"),
        ("--use_recompute false", "train.recompute", "none"),
        ("--recompute_granularity core_attn", "train.recompute", "core_attn"),
        ("--check_accuracy true", "model.dropout_hidden", 0.0),
        ("-p batch_range=[10,20];profile_path=x", "train.profile", (10, 20)),
        ("--lr_decay_style none", "optim.schedule", "constant"),
    ],
)
def test_s3_03_s3_04_s3_05_settings_beside_those_of_the_command(more: str, key: str, value: object) -> None:
    command = command_line.split([HYBRID], {"task_name": "x"}, Path())
    command.arguments.extend(more.split(" "))
    assert paddlenlp.translate(command, None).config[key] == value


def test_s3_01_run_sh_of_the_document_is_the_command_it_prints(tmp_path: Path) -> None:
    split = command_line.split(["sh run.sh"], {}, tmp_path)
    script = paddlenlp.translate(split, registry.Files(tmp_path))
    printed = paddlenlp.translate(command_line.split([HYBRID], {"task_name": "gpt-mp2-sharding4"}, tmp_path), None)
    assert (script.config, script.notes, script.logs) == (printed.config, printed.notes, printed.logs)
    (tmp_path / "run.sh").write_text("#!/bin/sh\nnvidia-smi\n", encoding="utf-8")
    with pytest.raises(UsageError, match="no line in it runs one of run_pretrain"):
        paddlenlp.translate(split, registry.Files(tmp_path))


def with_old_data(folder: Path) -> None:
    ids, lens = (
        np.load(folder / "data/gpt_en_dataset_300m_ids.npy"),
        np.load(folder / "data/gpt_en_dataset_300m_idx.npz"),
    )
    shutil.rmtree(folder / "data")
    (folder / "data").mkdir()
    np.savez(folder / "data/train.data.json_ids.npz", ids=ids, lens=lens["lens"].astype(np.uint16))


def test_s3_06_the_old_file_of_ids_trains_too(folder: Path) -> None:
    with_old_data(folder)
    assert run(folder, TRAIN + " --max_steps 3") == 0
    assert len(losses(folder / "output")) == 3


def test_s3_07_presets_up_to_13b_are_known_by_name() -> None:
    config = translated(TRAIN.replace("gpt2-en", "gpt3-13B-en")).config
    assert [config[f"model.{key}"] for key in ("num_layers", "hidden_size", "num_heads")] == [40, 5120, 128]


def test_mistakes_of_the_documents_get_an_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, TRAIN + " --mirco_batch_size 4") == 2
    assert "--mirco_batch_size: the document's misspelling; the flag is --micro_batch_size" in capsys.readouterr().err
    assert run(folder, TRAIN + " --use_amp", verb="translate") == 0
    out = capsys.readouterr().out
    assert "--use_amp stands alone: PaddleNLP's parser reads that as false" in out
    assert 'compute: "fp32"' in out
    assert run(folder, "tar -xvf openwebtext2.json.zst.tar -C  /path/to/openwebtext") == 2
    assert "the archive is called openwebtext2.jsonl.zst.tar" in capsys.readouterr().err
    assert run(folder, PREPARE.replace("/path/to/openwebtext/", "openwebtext2.json.zst.tar")) == 2
    assert "openwebtext2.jsonl.zst.tar" in capsys.readouterr().err
    assert run(folder, TRAIN + " --min_lr 0.001", verb="translate") == 0
    assert "max_lr 0.0001 is below min_lr 0.001" in capsys.readouterr().out


def test_unknown_missing_and_unset_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, TRAIN + " --weight_deacy 1") == 2
    assert "--weight_deacy: unknown; did you mean --weight_decay?" in capsys.readouterr().err
    assert run(folder, "python run_pretrain.py --model_type gpt") == 2
    assert "--input_dir: is required" in capsys.readouterr().err
    assert run(folder, TRAIN.replace("gpt2-en", "gpt5-en")) == 2
    assert "neither a folder nor a preset (gpt2-en," in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"\$task_name is not set"):
        command_line.split([HYBRID], {}, Path())
    assert run(folder, "task_name=x " + HYBRID, verb="translate") == 0
    assert 'out: "output/x"' in capsys.readouterr().out
    assert run(folder, TRAIN, extra=("--strict", "--dry-run")) == 0  # nothing of it is ignored
    assert run(folder, PREPARE + " --split_sentences", extra=("--strict",)) == 2


OTHERWISE = {
    "--model_type": "gpt-cn", "--model_name_or_path": "gpt2-medium-en", "--input_dir": "./other",
    "--output_dir": "other", "--device": "cpu", "--micro_batch_size": "4", "--global_batch_size": "64",
    "--use_sharding": "false", "--use_amp": "false", "--use_recompute": "false", "--mp_degree": "1",
    "--dp_degree": "2", "--sharding_degree": "2", "--pp_degree": "2",
}  # fmt: skip


def test_changing_any_mapped_flag_changes_the_configuration() -> None:
    """On the devices that the changed degrees need, so that it is the degree that matters."""
    start, program, flags = HYBRID.partition("run_pretrain_static.py")
    assert start
    plain = f"python {program}{flags.strip()} --micro_batch_size 2"
    before = translated(plain)
    mapped = {note.theirs: note.value for note in before.notes if note.ours}
    assert len(mapped) == 25
    for name, value in mapped.items():
        other = OTHERWISE.get(name) or f"{float(value) * 2:g}"
        assert translated(f"{plain} {name} {other}").config != before.config, name


# The document from its first command to its last. It is run once, and looked at row by row.


@dataclass(frozen=True)
class Story:
    folder: Path
    said: dict[str, foreign.Said]
    passages: list[str]
    model: gptworks.GPT  # what was trained


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> Story:
    """In one folder, empty at first; the path of the texts is ours, and 40 workers are 2."""
    folder = tmp_path_factory.mktemp("story")
    (folder / "openwebtext").mkdir()
    lines = [json.dumps({"text": each, "meta": {}}) + "\n" for each in texts_of(corpus_file)]
    (folder / "openwebtext/part.jsonl.zst").write_bytes(zstandard.compress("".join(lines).encode()))
    told: dict[str, foreign.Said] = {}

    def tell(name: str, command: str) -> None:
        told[name] = foreign.said(["run", "--device", "cpu", "--shrink", "tiny", "--cwd", str(folder), "--", command])

    tell("prepare", PREPARE.replace("/path/to/openwebtext/", "openwebtext/").replace("40", "2"))
    (folder / "data").mkdir()
    for name in ("gpt_openwebtext_ids.npy", "gpt_openwebtext_idx.npz"):
        shutil.move(folder / name, folder / "data")
    tell("train", TRAIN)
    convert(folder / "output/model_10", folder / "home/models/gpt2-en", "hf")
    model = gptworks.GPT.from_pretrained(folder / "home/models/gpt2-en").eval()
    (folder / "wikitext-103").mkdir()
    (folder / "wikitext-103/wiki.valid.tokens").write_text(" = Lamp = \n " + " ".join(PASSAGES * 4) + "\n")
    passages = [*guessed(model, texts_of(corpus_file)), *PASSAGES]
    (folder / "lambada_test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    tell("wikitext", WIKITEXT)
    tell("lambada", LAMBADA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPTWORKS_HOME", own_home(folder / "nothing"))
        tell("not here", LAMBADA_BY_NAME)
        patch.setenv("GPTWORKS_HOME", own_home(folder / "home"))
        tell("by name", LAMBADA_BY_NAME)
        tell("export", EXPORT)
        tell("infer", INFER)
    return Story(folder, told, passages, model)


def texts_of(corpus: Path) -> list[str]:
    return corpus.read_text(encoding="utf-8").split("\n\n")


def guessed(model: gptworks.GPT, texts: list[str]) -> list[str]:
    """Passages that end in the word which the model, hardly trained, expects there."""
    tokenizer = Tokenizer.from_pretrained("gpt2")
    found = []
    for text in texts:
        beginning = " ".join(text.split()[:20])
        with torch.no_grad():
            token = int(model(torch.tensor([tokenizer.encode(beginning)]))[0, -1].argmax())
        word = tokenizer.decode([token])
        if re.fullmatch(r" [A-Za-z]{2,}", word) and tokenizer.encode(word) == [token]:
            found.append(beginning + word)
    assert len(found) > 2
    return found[:3]


def losses_of(model: gptworks.GPT, ids: list[int]) -> list[float]:
    with torch.no_grad():
        scores = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return [-scores[place, token].item() for place, token in enumerate(ids[1:])]


@pytest.mark.slow
def test_x_01_the_document_from_raw_text_to_inference(story: Story) -> None:
    """Each command finds what the one before it left."""
    failed = {name: said.err for name, said in story.said.items() if said.code != 0}
    assert list(failed) == ["not here"]
    assert (story.folder / "output/model_10/model_state.pdparams").is_file()
    for name in ("wikitext", "lambada"):  # a shrunk run has no step 1000
        assert "./output/model_1000/model_state.pdparams is not here" in story.said[name].out


def test_s2_02_the_pair_is_read_by_the_original_rules(story: Story, corpus_file: Path) -> None:
    tokenizer = Tokenizer.from_pretrained("gpt2")
    documents = [[*tokenizer.encode(text.strip()), 50256] for text in texts_of(corpus_file) if text.strip()]
    ids = np.load(story.folder / "data/gpt_openwebtext_ids.npy")
    index = np.load(story.folder / "data/gpt_openwebtext_idx.npz")
    assert ids.dtype == np.uint16 and ids.tolist() == [token for document in documents for token in document]
    assert index["lens"].dtype == np.int32 and index["lens"].tolist() == [len(document) for document in documents]
    assert index["docs"].dtype == np.int64 and index["docs"].tolist() == list(range(len(documents) + 1))


def test_s2_12_what_visualdl_shows_is_in_tensorboards_files(story: Story) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(story.folder / "output/tensorboard"))
    events.Reload()
    rows = [json.loads(line) for line in (story.folder / "output/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    for name in ("loss", "lr", "tokens_per_sec"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(step, pytest.approx(rows[step - 1][name])) for step in range(1, 11)]


NUMBER = r"\d\.\d{4}E[+-]\d\d"


def test_s2_07_perplexity_of_wikitext_is_the_one_of_its_definition(story: Story) -> None:
    data = "./wikitext-103/wiki.valid.tokens"
    text = (story.folder / data).read_text()
    ids = Tokenizer.from_pretrained("gpt2").encode(detokenize(text))
    nats = sum(losses_of(story.model, ids[:65]))  # a shrunk model reads 64 tokens
    for begin in range(32, len(ids) - 64 - 1 + 32, 32):
        nats += sum(losses_of(story.model, ids[begin : begin + 65])[32:])
    words = len(text.strip().split(" ")) - 1
    *_, last = story.said["wikitext"].out.splitlines()
    line = (
        rf" - +validation results on {data} \| avg loss: ({NUMBER}) \| ppl: ({NUMBER}) \| adjusted ppl: ({NUMBER}) \| "
    )
    found = re.search(line + r"token ratio: (\S+) \|$", last)
    assert found, last
    expected = [nats / (len(ids) - 1), np.exp(nats / (len(ids) - 1)), np.exp(nats / words), (len(ids) - 1) / words]
    assert [float(each) for each in found.groups()] == pytest.approx(expected, rel=1e-4)


def test_s2_08_s1_14_lambada_in_the_lines_of_the_document(story: Story) -> None:
    """Three of five passages end in the word that the model expects."""
    lines = story.said["lambada"].out.splitlines()
    (first,) = [line for line in lines if " step 0, batch: 0, number correct: 3.000000, speed: " in line]
    assert re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[    INFO\] - step 0", first)
    assert lines[-1].endswith(
        "[    INFO] -  validation results on ./lambada_test.jsonl | number correct: 3.0000E+00 | total examples: "
        "5.0000E+00 | avg accuracy: 6.0000E-01"
    )


def test_s2_09_without_a_checkpoint_the_model_of_that_name_is_used(story: Story) -> None:
    missing = story.said["not here"]
    assert missing.code == 2 and "gpt2-en" in missing.err and str(story.folder / "nothing/models") in missing.err
    last = [story.said[name].out.splitlines()[-1].partition("validation")[2] for name in ("lambada", "by name")]
    assert last[0] == last[1] != ""


def test_s2_10_the_folder_has_the_files_of_the_document(story: Story) -> None:
    names = {path.name for path in (story.folder / "infer_model").iterdir()}
    assert names >= {"vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"}
    assert names >= {"model.pt2", "model.info.json", "run.py"}  # for model.pdmodel, .pdiparams and .pdiparams.info
    assert "a program of torch.export" in story.said["export"].out


def test_s2_11_inference_answers_the_questions_from_that_folder(story: Story) -> None:
    tokenizer = Tokenizer.from_pretrained("gpt2")
    assert len(paddlenlp.QUESTIONS) == 7
    for question in paddlenlp.QUESTIONS:
        ids = tokenizer.encode(question)
        for _ in range(8):
            with torch.no_grad():
                ids.append(int(story.model(torch.tensor([ids]))[0, -1].argmax()))
        assert tokenizer.decode(ids) in story.said["infer"].out


# Beside the document's commands


@pytest.mark.parametrize(
    "words",
    [
        ["python", "-c", "import paddle; paddle.utils.run_check()"],
        ["python3 -c 'import paddle; paddle.utils.run_check()'"],
        ["python\nimport paddle\npaddle.utils.run_check()"],  # as the document has it
    ],
)
def test_s2_01_the_check_of_an_installation_is_ours(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = [Finding("torch", "ok", "2.9")]
    monkeypatch.setattr("gptworks.doctor.machine.findings", lambda: ready)
    assert main(["run", "--", *words]) == 0
    told = capsys.readouterr().out
    assert "$ gptworks doctor" in told and told.splitlines()[-1] == "ready"
    ready.append(Finding("gloo", "problem", "does not answer", "Fix the network."))
    assert main(["run", "--", *words]) == 2
    assert "gloo: Fix the network." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [10, 50, 69, 1990])
def test_s0_06_documents_are_split_by_the_rule_of_2021(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The borders are those PaddleNLP came to."""
    orders = json.loads((Path(__file__).parents[1] / "fixtures/orders/paddle_orders.json").read_text())
    (borders,) = {
        tuple(case["borders"])
        for case in orders["cases"]
        if case["split"] == "949,50,1" and len(orders["stores"][case["store"]]) == number
    }
    foreign.paddle_pair(tmp_path / "data/corpus", [np.full(9, 7)] * number)
    found = foreign.translate(capsys, TRAIN + " --split 949,50,1 --max_seq_len 4", "--cwd", str(tmp_path))
    expected = [(begin, end) if begin < end else None for begin, end in itertools.pairwise(borders)]
    assert foreign.parts_of(found["config"], tmp_path) == expected
