"""A trained reward model at work: a number for each answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from swiftkit.config import ReadyModelKnobs
from swiftkit.data import AnswerRow, Document, Message, Origin, Renderer, Row, collate_answers, to_example
from swiftkit.engine import Batch, Engine
from swiftkit.errors import UserError
from swiftkit.generate.find import find
from swiftkit.generate.load import prepare_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROWS = 8  # scored at once


def scores_of(score: nn.Linear, hidden: Tensor, batch: Batch) -> Tensor:
    """The score of each answer's last token, float32 [answers]; `hidden` is [tokens, hidden]."""
    assert batch.answers is not None, "a batch of answers"
    scores: Tensor = score(hidden[batch.answers.ends].float())
    return scores[:, 0]


class RewardModel:
    """Scores answers; the difference of two scores is the log-odds that the first is the better one.

    Args:
        engine, tokenizer: the model.
        system: system message for conversations that have none, as in its training.
    """

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerFast, *, system: str | None = None):
        self.engine, self.tokenizer = engine, tokenizer
        self._renderer = Renderer(tokenizer, system=system)

    @classmethod
    def load(cls, knobs: ReadyModelKnobs) -> RewardModel:
        """Load what the knobs name.

        Raises:
            UserError: there is no reward model.
        """
        where = find(adapters=knobs.adapters, model=knobs.model)
        ready = prepare_model(where, knobs, say=print, scores=True)
        return cls(ready.load(), ready.tokenizer, system=where.trained.get("system"))

    def documents(self, answers: Sequence[Sequence[Message] | tuple[str, str]]) -> list[Document]:
        """Answers as the training had them."""
        rows: list[dict[str, Any]] = [
            {"prompt": answer[0], "completion": answer[1]}
            if isinstance(answer, tuple)
            else {"messages": list(answer)}
            for answer in answers
        ]
        return self._renderer.documents(
            [to_example(Row(row, Origin("answer", number))) for number, row in enumerate(rows, 1)]
        )

    @torch.no_grad()
    def score(self, answers: Sequence[Sequence[Message] | tuple[str, str]]) -> list[float]:
        """One score an answer.

        Args:
            answers: conversations that end with the answer, or (prompt, completion) of plain text.

        Raises:
            UserError: an answer is empty or no conversation.
        """
        if not all(answers):
            raise UserError("an answer to score is a list of messages, or (prompt, completion)")
        self.engine.model.eval()
        found: list[float] = []
        rows = [AnswerRow((document,), np.zeros(1)) for document in self.documents(answers)]
        for start in range(0, len(rows), ROWS):
            packed = collate_answers(rows[start : start + ROWS], pad_id=0)
            batch = Batch.of(packed, device=self.engine.device)
            scores = scores_of(self.engine.model.score, self.engine.hidden(batch), batch)  # type: ignore[arg-type]
            found += scores.tolist()
        return found
