"""Whether a base model ever learnt the special tokens that its chat template writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.probe import MARKED_ANSWER, QUESTION
from swiftkit.data.template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TINY = 1e-3  # of the median norm: a trained row is never so short, and a row of zeros stays one


def template_tokens(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> dict[int, str]:
    """The special tokens in a question, its answer and the next prompt: id to word, by id."""
    asked = template.render([*QUESTION, MARKED_ANSWER, *QUESTION], add_generation_prompt=True)
    ids: list[int] = tokenizer(asked, add_special_tokens=False)["input_ids"]
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return {token: added[token].content for token in sorted(set(ids)) if token in added}


def never_trained(
    tokens: Mapping[int, str], rows: NDArray[np.float32], ordinary: NDArray[np.float32]
) -> list[str]:
    """The tokens whose embedding looks as it did before any training: next to nothing, or another's double.

    Args:
        tokens: id to word, in the order of `rows`.
        rows: input embeddings of those tokens, [tokens, hidden].
        ordinary: of some tokens that every text has, [any, hidden].
    """
    median = float(np.median(np.linalg.norm(ordinary, axis=1)))
    short = np.linalg.norm(rows, axis=1) < TINY * median
    double = (rows[:, None, :] == rows[None, :, :]).all(axis=2).sum(axis=1) > 1
    return [word for word, untrained in zip(tokens.values(), short | double, strict=True) if untrained]


def warning(words: list[str]) -> str:
    """The sentence about tokens that were never trained."""
    return (
        f"the chat template writes {', '.join(words)}, and this base model never learnt "
        f"{'them' if len(words) > 1 else 'it'} (their embeddings are as at initialisation); adapters do not "
        "train embeddings: take the instruct model, a --chat_template with words the model knows, or train "
        "them too (--modules_to_save embed_tokens lm_head)"
    )
