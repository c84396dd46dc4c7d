from __future__ import annotations

import numpy as np

from swiftkit.data.template import ChatTemplate
from swiftkit.data.template_tokens import never_trained, template_tokens, warning
from tests.cases.toy import tokenizer


def test_the_tokens_that_a_template_writes() -> None:
    toy = tokenizer()
    from swiftkit.data import resolve_chat_template

    template = ChatTemplate(toy, source=resolve_chat_template("chatml"))
    assert template_tokens(toy, template) == {3: "<|im_start|>", 4: "<|im_end|>"}


def test_rows_that_no_training_touched(seed: int) -> None:
    random = np.random.default_rng(seed)
    ordinary = random.normal(size=(64, 16)).astype(np.float32)
    tokens = {3: "<a>", 4: "<b>", 5: "<c>", 6: "<d>", 7: "<e>"}
    rows = random.normal(size=(5, 16)).astype(np.float32)
    assert never_trained(tokens, rows, ordinary) == []
    rows[0] = 0
    rows[1] *= 1e-6
    rows[3] = rows[2]
    found = never_trained(tokens, rows, ordinary)
    assert found == ["<a>", "<b>", "<c>", "<d>"]
    assert "<a>, <b>, <c>, <d>" in warning(found)
