"""gw.Trainer where torchrun has started several processes: what was given in memory is written by one of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gptworks as gw
from gptworks.api import trainer as trainers
from gptworks.config.derive import Layout
from gptworks.launch import process_group
from gptworks.launch.world import World

SHAPE = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 512, "max_positions": 16}
TEXTS = [f"On {day} morning {who} found a map." for day in ("Monday", "Friday") for who in ("Anna", "Tom", "Mei")] * 3


def test_one_rank_writes_for_all(
    run_layout: Callable[..., list[Any]], small_tokenizer: gw.Tokenizer, tmp_path: Path
) -> None:
    def run(world: World) -> tuple[list[str], float]:
        place = {"RANK": world.rank, "WORLD_SIZE": 2, "LOCAL_RANK": world.rank, "MASTER_ADDR": "h", "MASTER_PORT": 1}
        os.environ |= {name: str(value) for name, value in place.items()}
        process_group.start = lambda *_: world  # type: ignore[assignment]
        written: list[str] = []

        def noted(name: str, write: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: (written.append(name), write(*args))[1]

        trainers.write_store = noted("texts", trainers.write_store)  # type: ignore[assignment]
        gw.GPT.save_pretrained = noted("model", gw.GPT.save_pretrained)  # type: ignore[method-assign]
        settings: dict[str, Any] = {"train": {"steps": 2}, "batch": {"global_size": 2}, "parallel": {"dp": 2}}
        settings |= {"run": {"device": "cpu", "threads": 1}, "tokenizer": small_tokenizer, "train_dataset": TEXTS}
        first = gw.Trainer(model=SHAPE, out=tmp_path / "first", **settings)
        first.train()
        again = gw.Trainer(model=first.model, eval_dataset=TEXTS[:6], out=tmp_path / "again", **settings)
        assert again.train().step == 2
        return written, again.evaluate().loss

    (main, loss), (other, same_loss) = run_layout(Layout(dp=2), run)
    assert main == ["texts", "texts", "texts", "model"]
    assert other == []
    assert loss == same_loss
