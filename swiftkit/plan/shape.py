"""What a dense decoder is made of, as counts: weights, adapters, and the widths that activations have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from swiftkit.errors import UserError
from swiftkit.registry import Dimensions

Cut = Literal["column", "row"]


class Linear(NamedTuple):
    """One linear layer of a block, and how tensor parallelism cuts it."""

    name: str
    rows: int  # outputs
    columns: int  # inputs
    cut: Cut

    @property
    def weights(self) -> int:
        """Numbers of its matrix."""
        return self.rows * self.columns


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder of the Llama shape; biases and norms are too small to count.

    Args:
        hidden: width of the residual stream.
        layers: how many blocks.
        heads, kv_heads, head_dim: of the attention.
        inter: width of the MLP.
        vocab: rows of the embedding.
        tied: whether embedding and head are one matrix.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    tied: bool = False

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    def linears(self) -> Iterator[Linear]:
        """The linear layers of one block."""
        yield Linear("q_proj", self.query_width, self.hidden, "column")
        yield Linear("k_proj", self.kv_width, self.hidden, "column")
        yield Linear("v_proj", self.kv_width, self.hidden, "column")
        yield Linear("o_proj", self.hidden, self.query_width, "row")
        yield Linear("gate_proj", self.inter, self.hidden, "column")
        yield Linear("up_proj", self.inter, self.hidden, "column")
        yield Linear("down_proj", self.hidden, self.inter, "row")

    @property
    def layer_weights(self) -> int:
        """Numbers in the linear layers of one block."""
        return sum(linear.weights for linear in self.linears())

    @property
    def qkv_weights(self) -> int:
        """Numbers in q, k and v of one block."""
        return (self.query_width + 2 * self.kv_width) * self.hidden

    @property
    def block_weights(self) -> int:
        """Numbers in the linear layers of all blocks."""
        return self.layers * self.layer_weights

    @property
    def end_weights(self) -> int:
        """Numbers in embedding and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def weights(self) -> int:
        """Numbers of the whole model."""
        return self.block_weights + self.end_weights

    def adapter_weights(self, rank: int) -> tuple[int, int]:
        """Numbers of a LoRA adapter on every linear layer of the blocks.

        Args:
            rank: of the adapter.

        Returns:
            Those that tensor parallelism cuts (B of column layers, A of row layers), and those that each of
            its ranks holds whole (A of column layers, B of row layers).
        """
        cut = sum(lin.rows if lin.cut == "column" else lin.columns for lin in self.linears())
        whole = sum(lin.columns if lin.cut == "column" else lin.rows for lin in self.linears())
        return self.layers * rank * cut, self.layers * rank * whole


def shape_of(name: str, dimensions: Dimensions) -> ModelShape:
    """The shape of a recipe's dimensions.

    Raises:
        UserError: for a mixture of experts, whose tokens do not all meet the same weights.
    """
    if dimensions.num_experts is not None:
        raise UserError(f"{name} is a mixture of experts, and the plan knows dense models only")
    return ModelShape(
        name=name,
        hidden=dimensions.hidden_size,
        layers=dimensions.num_hidden_layers,
        heads=dimensions.num_attention_heads,
        kv_heads=dimensions.num_key_value_heads,
        head_dim=dimensions.head_dim,
        inter=dimensions.intermediate_size,
        vocab=dimensions.vocab_size,
        tied=dimensions.tie_word_embeddings,
    )
