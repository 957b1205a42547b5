"""The sizes that decide what a block holds while it is trained."""

from dataclasses import dataclass

from gptworks.plan.sizes import FP32


@dataclass(frozen=True)
class BlockShape:
    """All that decides what a block holds: sizes here, after tensor parallelism has cut them."""

    rows: int
    length: int
    hidden: int
    ffn: int
    heads: int
    matrices: tuple[tuple[str, int], ...]  # (name, numbers in it)
    tp: int = 1
    split: bool = False  # tokens between the matrices are split over tp
    compute: int = 4  # bytes
    attention: str = "fused"  # fused, sdpa_math (torch's own, with dropout on a CPU) or math
    gelu: str = "tanh"
    dropout: bool = False
    dropout_attention: bool = False
    cpu: bool = True
    recompute: str = "none"
    casts: bool = True  # modules cast their weights; False where FSDP has done it before
    kv_heads: int = 0  # heads of keys and values; 0: as many as heads
    head_size: int = 0  # 0: what the heads have of the hidden size
    norm: str = "layernorm"
    mlp: str = "gelu"
    positions: str = "learned"
    head_norms: bool = False  # of queries and keys
    windowed: bool = False  # attention takes a mask

    @property
    def narrow(self) -> bool:
        return self.compute < FP32

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def own_tokens(self) -> int:
        return self.tokens // self.tp if self.split else self.tokens

    @property
    def stream(self) -> int:
        """The residual stream."""
        return self.own_tokens * self.hidden * self.compute

    @property
    def whole(self) -> int:
        """The residual stream of all tokens, also where it is split along the sequence."""
        return self.tokens * self.hidden * self.compute

    @property
    def in_heads(self) -> int:
        """Queries, or what they give; keys or values of as many heads."""
        return self.tokens * (self.heads * self.head_size or self.hidden // self.tp) * self.compute

    @property
    def in_kv_heads(self) -> int:
        """Keys or values."""
        return self.in_heads // self.heads * (self.kv_heads or self.heads)

    @property
    def qkv(self) -> int:
        return self.in_heads + 2 * self.in_kv_heads

    @property
    def repeated(self) -> bool:
        """Whether several heads share keys and values, which are written once for each of them."""
        return self.in_kv_heads < self.in_heads

    @property
    def inner(self) -> int:
        return self.tokens * self.ffn * self.compute

    @property
    def scores(self) -> int:
        """Elements of the attention matrices."""
        return self.rows * self.heads * self.length * self.length

    @property
    def copies_heads(self) -> bool:
        """Whether batched products need queries, keys and values in an order of their own."""
        return self.rows > 1 and self.heads > 1

    @property
    def keeps_copies(self) -> bool:
        """Instead of qkv itself."""
        return self.attention != "fused" and (self.copies_heads or (self.attention == "sdpa_math" and self.narrow))

    @property
    def mask(self) -> int:
        """What dropout keeps of one stream: on a CPU the factors themselves."""
        if not self.dropout:
            return 0
        return self.stream if self.cpu else self.own_tokens * self.hidden

    @property
    def transposed(self) -> int:
        """1 where tokens of several rows change their order when they are gathered or scattered."""
        return 1 if self.rows > 1 else 0

    def matrix(self, name: str) -> int:
        """Numbers in one of the matrices: qkv, out, gate, up or down."""
        return dict(self.matrices)[name]
