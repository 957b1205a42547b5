"""All stores of a run as one: their common tokenizer, and the samples of each part."""

from gptworks.config.schema import DataConfig
from gptworks.data import foreign_order
from gptworks.data.loader import Borders
from gptworks.data.store import Store
from gptworks.data.windows import OrderedSamples, build_samples
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer


class Dataset:
    def __init__(self, cfg: DataConfig, *, vocab_size: int, seed: int = 0) -> None:
        if not cfg.path:
            raise DataError(
                "data.path: not set. Needed: the prefix of a store; `gptworks prepare FILE... --out PREFIX` makes one."
            )
        self.cfg, self.seed, self.vocab_size = cfg, seed, vocab_size
        self.stores = [Store(path) for path in cfg.path]
        if self.has_foreign_order:
            foreign_order.refuse_unfit(self.stores, cfg, seed)
        self.tokenizer = self._common_tokenizer()
        for store in self.stores:
            if store.sidecar and store.sidecar.vocab_size > vocab_size:
                raise DataError(
                    f"{store.file}: its tokenizer has {store.sidecar.vocab_size} tokens, but "
                    f"model.vocab_size is {vocab_size}. "
                    f"Set model.vocab_size={store.sidecar.vocab_size} or more."
                )
        eod_id = self.tokenizer.eod_id if self.tokenizer else None
        self.borders = Borders.from_config(cfg, eod_id)
        without = [s for s in self.stores if s.sidecar and not s.sidecar.eod_appended]
        for name in ("mask_eod", "reset_positions", "reset_attention"):
            if getattr(cfg, name) and without:
                raise DataError(
                    f"data.{name}: {without[0].file} has no end-of-document tokens to act on. Prepare it "
                    "again with --append-eod."
                )

    @property
    def has_foreign_order(self) -> bool:
        return self.cfg.order in foreign_order.ORDERS

    def samples(self, part: str, asked: int | None = None) -> OrderedSamples:
        """Only the orders of other systems depend on how many are asked for (None = one epoch)."""
        if self.has_foreign_order:
            return foreign_order.build_samples(self.stores, part, self.cfg, self.seed, asked)
        return build_samples(self.stores, part, self.cfg, self.seed)

    def samples_per_epoch(self, part: str) -> int:
        """Known before the order is."""
        if self.has_foreign_order:
            return sum(foreign_order.per_epoch(store, part, self.cfg) for store in self.stores)
        return self.samples(part).per_epoch

    @property
    def identities(self) -> list[str]:
        return [store.identity for store in self.stores]

    @property
    def tokenizer_identity(self) -> str:
        return self.tokenizer.identity if self.tokenizer else ""

    def _common_tokenizer(self) -> Tokenizer | None:
        given = Tokenizer.from_pretrained(self.cfg.tokenizer) if self.cfg.tokenizer else None
        described = [store for store in self.stores if store.sidecar]
        for store in described:
            assert store.sidecar
            given = given or store.load_tokenizer()
            if given is not None:
                given.require(store.sidecar.tokenizer_identity, what=f"{store.file}")
        ends = {store.sidecar.eod_id for store in described if store.sidecar}
        if len(ends) > 1:
            listed = ", ".join(str(eod_id) for eod_id in sorted(ends, key=str))
            raise DataError(
                f"data.path: the stores end documents with different tokens (ids {listed}). "
                "Prepare them with the same tokenizer files."
            )
        return given.with_eod(ends.pop()) if given and ends else given
