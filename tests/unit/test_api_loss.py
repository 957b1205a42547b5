"""model(tokens) and model.loss(tokens): against transformers and against the training step, in both modes."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gptworks as gw
from gptworks.config.schema import DataConfig
from gptworks.data.dataset import Dataset
from gptworks.data.loader import collate
from gptworks.errors import UsageError
from gptworks.launch.world import World
from gptworks.parallel.parts import SingleStage
from gptworks.train import optim
from gptworks.train.precision import LossScaler
from gptworks.train.step import train_step

VOCAB, CONTEXT = 512, 16


@pytest.fixture(scope="module")
def folder(small_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights far from zero, saved by transformers, without dropout."""
    torch.manual_seed(3)
    off = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_head=2, n_layer=2, n_positions=CONTEXT, initializer_range=0.3, **off)
    )
    path = tmp_path_factory.mktemp("loss")
    theirs.save_pretrained(path)
    small_tokenizer.save(path)
    return path


@pytest.fixture
def model(folder: Path) -> gw.GPT:
    return gw.GPT.from_pretrained(folder)


TEXTS = ["Anna walked to the river", "Tom took the letter home.", "It was"]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padding", [True, "max_length"])
def test_the_loss_of_a_padded_batch_equals_transformers(
    model: gw.GPT, folder: Path, training: bool, padding: bool | str
) -> None:
    assert model.tokenizer is not None
    batch = model.tokenizer(TEXTS, padding=padding, max_length=CONTEXT, return_tensors="pt")
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    assert (mask == 0).any(), "the rows must differ in length"
    theirs = GPT2LMHeadModel.from_pretrained(folder).train(training)
    expected = theirs(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss
    got = model.train(training).loss(tokens, mask)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    got.backward()
    torch.testing.assert_close(model.wte.weight.grad, theirs.transformer.wte.weight.grad, rtol=1e-4, atol=1e-6)
    alone = [model.loss(torch.tensor([model.tokenizer.encode(text)])) for text in TEXTS]
    counts = mask.sum(1) - 1
    torch.testing.assert_close(got, (torch.stack(alone) * counts).sum() / counts.sum(), rtol=1e-5, atol=1e-6)


def test_an_end_of_document_inside_the_text_is_scored(model: gw.GPT) -> None:
    tokens = torch.tensor([[5, 511, 9, 511]])
    without = torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
    torch.testing.assert_close(model.loss(tokens), without)
    torch.testing.assert_close(model.loss(tokens, torch.ones_like(tokens)), without)
    masked = model.loss(tokens, torch.tensor([[1, 1, 1, 0]]))
    torch.testing.assert_close(masked, model.loss(tokens[:, :3]))


@pytest.mark.parametrize("training", [False, True])
def test_calling_the_model_gives_logits_in_either_mode(model: gw.GPT, folder: Path, training: bool) -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = GPT2LMHeadModel.from_pretrained(folder).eval()(tokens).logits
    torch.testing.assert_close(model.train(training)(tokens), expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_that_of_training_on_the_same_window(model: gw.GPT, small_store: Path) -> None:
    data = DataConfig(path=(str(small_store),), seq_len=CONTEXT)
    dataset = Dataset(data, vocab_size=VOCAB)
    batch = collate(dataset.samples("train").at(0, 3), 0, dataset.eod_policy)
    windows = torch.cat([batch.tokens, batch.labels[:, -1:]], 1)
    assert windows.shape == (3, CONTEXT + 1)
    ours = {training: model.train(training).loss(windows).item() for training in (True, False)}
    report = train_step(
        SingleStage(model.train()),
        optim.build(model, gw.load_config().optim),
        [batch],
        World(torch.device("cpu")),
        LossScaler(gw.load_config().precision.scaler, enabled=False),
        clip=1.0,
        seed=0,
        step=1,
    )
    assert ours[True] == ours[False] == pytest.approx(report.loss, rel=1e-6)


@pytest.mark.parametrize(
    ("tokens", "mask", "said"),
    [
        ([1, 2, 3], None, r"shape \[3\]"),
        ([[1]], None, r"shape \[1, 1\]"),
        ([[1, 2]], [[1, 1, 1]], r"attention_mask: got shape \[1, 3\]; needs \[1, 2\]"),
        ([[1, 2, 3], [1, 2, 3]], [[1, 1, 1], [0, 1, 1]], r"row 1 is \[0, 1, 1\]; needs padding on the right"),
        ([[1, 2, 3]], [[1, 0, 1]], r"row 0 is \[1, 0, 1\]"),
        ([[1, 2], [1, 2]], [[1, 0], [0, 0]], "no token is scored"),
        ([list(range(CONTEXT + 2))], None, f"{CONTEXT + 1} tokens in a row, but the model has {CONTEXT} positions"),
    ],
)
def test_what_has_no_loss_is_refused(model: gw.GPT, tokens: list, mask: list | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        model.loss(torch.tensor(tokens), None if mask is None else torch.tensor(mask))


def test_the_context_may_be_filled(model: gw.GPT) -> None:
    assert model.loss(torch.arange(CONTEXT + 1)[None]).isfinite()


@pytest.mark.parametrize("tokens", [[[3, 999]], [[-1, 2]]])
def test_tokens_outside_the_vocabulary(tokens: list[list[int]], model: gw.GPT) -> None:
    with pytest.raises(UsageError, match=r"model: token (999|-1) is not in the vocabulary \(0 to"):
        model(torch.tensor(tokens))


@pytest.mark.parametrize("tokens", [torch.tensor([1, 2]), torch.tensor([[1.0, 2.0]])])
def test_what_are_no_tokens(tokens: torch.Tensor, model: gw.GPT) -> None:
    with pytest.raises(UsageError, match=r"needs whole numbers \[rows, tokens\]"):
        model(tokens)
