"""All stores of a run as one: their common tokenizer, and the samples of each split."""

from collections.abc import Sequence

from gptworks.config.schema import DataConfig
from gptworks.data import foreign_order
from gptworks.data.loader import EodPolicy
from gptworks.data.mixture import Stage
from gptworks.data.split import SPLITS, boundaries
from gptworks.data.store import Store, locate_stores
from gptworks.data.windows import LocatedSamples, build_samples, empty_stores
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer


class Dataset:
    def __init__(self, cfg: DataConfig, *, vocab_size: int, seed: int = 0, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer`: that of the model, for stores that do not say which it is, where data.tokenizer does not."""
        if not cfg.path:
            raise DataError(
                "data.path: not set. Needed: a text file or a folder of text, or the prefix of a store; `gptworks "
                "prepare FILE... --out PREFIX` makes one."
            )
        self.cfg, self.seed, self.vocab_size = cfg, seed, vocab_size
        self._of_paths = [[Store(located) for located in locate_stores(path)] for path in cfg.path]
        self.stores = [store for stores in self._of_paths for store in stores]
        weights = self.shared_out(cfg.weights)
        self.stages = tuple(
            Stage(stage.from_tokens // cfg.seq_len, self.shared_out(stage.weights)) for stage in cfg.stages
        ) or ((Stage(0, weights),) if weights else ())
        # Shares as the splits of data.path are cut: held-out stores of their own leave the second share to training.
        self.cfg = cfg = cfg.model_copy(update={"weights": weights})
        self.held_out_stores = [Store(located) for path in cfg.held_out_path for located in locate_stores(path)]
        if self.has_foreign_order:
            foreign_order.refuse_unfit(self.stores, cfg, seed)
            foreign_order.refuse_unfit(self.held_out_stores, cfg, seed)
        self.tokenizer = self._common_tokenizer(tokenizer)
        for store in self._all_stores:
            if store.sidecar and store.sidecar.vocab_size > vocab_size:
                raise DataError(
                    f"{store.file}: its tokenizer has {store.sidecar.vocab_size} tokens, but "
                    f"model.vocab_size is {vocab_size}. Prepare it with the tokenizer of the model, or, for a model "
                    f"that starts from random weights, set model.vocab_size={store.sidecar.vocab_size} or more."
                )
        eod_id = self.tokenizer.eod_id if self.tokenizer else None
        self.eod_policy = EodPolicy.from_config(cfg, eod_id)
        without = [s for s in self._all_stores if s.sidecar and not s.sidecar.eod_appended]
        for name in ("mask_eod", "reset_positions", "reset_attention"):
            if getattr(cfg, name) and without:
                raise DataError(
                    f"data.{name}: {without[0].file} has no end-of-document tokens to act on. Prepare it "
                    "again with --append-eod."
                )

    def shared_out(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Weights of paths as weights of stores: that of a folder is shared among those in it by their tokens."""
        shares: list[float] = []
        for stores, weight in zip(self._of_paths, weights, strict=False):  # without weights there are no shares
            tokens = [max(1, len(store.tokens)) for store in stores]
            shares += [weight * count / sum(tokens) for count in tokens]
        return tuple(shares)

    @property
    def has_foreign_order(self) -> bool:
        return self.cfg.order in foreign_order.ORDERS

    @property
    def _all_stores(self) -> list[Store]:
        return self.stores + self.held_out_stores

    def _cut(self, split: str) -> tuple[list[Store], DataConfig]:
        """Where the samples of a split come from, and how those stores are shared out."""
        if not self.held_out_stores:
            return self.stores, self.cfg
        if split == "held_out":
            return self.held_out_stores, self.cfg.model_copy(update={"split": (0.0, 1.0, 0.0), "weights": ()})
        train, held_out, test = [*self.cfg.split, 0.0, 0.0][:3]
        return self.stores, self.cfg.model_copy(update={"split": (train + held_out, 0.0, test)})

    def samples(self, split: str, asked: int | None = None, stages: Sequence[Stage] | None = None) -> LocatedSamples:
        """Only the orders of other systems depend on how many are asked for (None = one epoch). `stages`: weights as a
        run has had them, instead of those of the configuration."""
        stores, cfg = self._cut(split)
        if self.has_foreign_order:
            return foreign_order.build_samples(stores, split, cfg, self.seed, asked)
        return build_samples(stores, split, cfg, self.seed, self.stages if stages is None else stages)

    def not_measured(self, split: str) -> list[str]:
        """Why some of the stores have nothing in this split, where others have."""
        if self.has_foreign_order:
            return []
        stores, cfg = self._cut(split)
        return [str(error) for error in empty_stores(stores, split, cfg).values()]

    def documents(self, split: str) -> list[tuple[Store, range]]:
        """The documents of a split, store by store."""
        if self.has_foreign_order:
            raise DataError(
                f"data.order: {self.cfg.order} cuts samples across documents, so there is no loss of single ones. "
                "Use the store with data.order: shuffled."
            )
        stores, cfg = self._cut(split)
        which = SPLITS.index(split)
        ranges = []
        for store in stores:
            if not store.contents.has_documents:
                raise DataError(f"{store.file}: a bare stream of tokens; where its documents end is not known.")
            borders = boundaries(cfg.split, store.num_documents)
            ranges.append((store, range(borders[which], borders[which + 1])))
        return ranges

    def samples_per_epoch(self, split: str) -> int:
        """Known before the order is."""
        if self.has_foreign_order:
            stores, cfg = self._cut(split)
            return sum(foreign_order.per_epoch(store, split, cfg) for store in stores)
        return self.samples(split).per_epoch

    @property
    def identities(self) -> list[str]:
        return [store.identity for store in self.stores]

    @property
    def tokenizer_identity(self) -> str:
        return self.tokenizer.identity if self.tokenizer else ""

    def _common_tokenizer(self, of_model: Tokenizer | None) -> Tokenizer | None:
        described = [store for store in self._all_stores if store.sidecar]
        tokenizer = Tokenizer.from_pretrained(self.cfg.tokenizer) if self.cfg.tokenizer else None
        for store in self._all_stores:
            if store.sidecar is None and (beside := store.load_tokenizer()):
                tokenizer = tokenizer or beside
                tokenizer.require(beside.identity, source=f"{store.file} ({beside.name})")
        if not described:
            return tokenizer or of_model
        for store in described:
            assert store.sidecar
            tokenizer = tokenizer or store.load_tokenizer()
            if tokenizer is not None:
                tokenizer.require(store.sidecar.tokenizer_identity, source=f"{store.file}")
        ends = {store.sidecar.eod_id for store in described if store.sidecar}
        if len(ends) > 1:
            listed = ", ".join(str(eod_id) for eod_id in sorted(ends, key=str))
            raise DataError(
                f"data.path: the stores end documents with different tokens (ids {listed}). "
                "Prepare them with the same tokenizer files."
            )
        return tokenizer.with_eod(ends.pop()) if tokenizer and ends else tokenizer
