"""The short way through a template gives what the long way gives, and steps aside where it could not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from swiftkit.data import ChatTemplate, Conversation, Origin
from swiftkit.data.conversation import TrainOn
from swiftkit.data.document import RowError
from swiftkit.data.layout import Layout
from tests.cases.toy import template, tokenizer
from tests.chat_templates import THINKING, WITH_CALLS

pytestmark = pytest.mark.compat

TRIMS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
SHOUTS = (  # does something of its own with some words
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if 'loud' in m['content'] %}{{ m['content'] | upper }}{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>{% endfor %}"
)
TWICE = "{{ messages[0]['content'] }}: {% for m in messages %}({{ m['content'] }}){% endfor %}"
SOURCES: dict[str, str] = {
    "chatml": Path(template("chatml")).read_text(encoding="utf-8"),
    "trims": TRIMS,
    "shouts": SHOUTS,
    "twice": TWICE,
    **{f"calls {name}": source for name, source in dict(WITH_CALLS).items()},
    "thinking": THINKING,
}
WORDS = [
    *("hello", " two words", "line\n", "\n", "", "<|im_end|>", "été 数学", "<think>\nhm\n</think>\n\nyes"),
    *("loud", "PLACE00000HOLDER", "\ufdd0", "assistant", "\u3000x", "[INST]"),
]


def layout(build: ChatTemplate, conversation: Conversation, train_on: TrainOn) -> Layout | str:
    try:
        return build.layout(conversation, train_on=train_on)
    except RowError as error:
        return error.reason


@pytest.mark.parametrize("name", SOURCES)
def test_both_ways_are_one(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(f"{seed} {name}")
    short, long = (ChatTemplate(tokenizer("bos"), source=SOURCES[name]) for _ in range(2))
    monkeypatch.setattr(long, "_outlines", _Never())
    taken = 0
    for _ in range(150):
        turns = draw.randint(1, 5)
        messages: list[dict[str, Any]] = [
            {
                "role": ("user", "assistant")[turn % 2],
                "content": "".join(draw.choices(WORDS, k=draw.randint(0, 2))),
            }
            for turn in range(turns)
        ]
        if draw.random() < 0.2:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        if draw.random() < 0.1:
            messages[-1]["name"] = "somebody"
        some = frozenset(index for index in range(len(messages)) if draw.random() < 0.15)
        conversation = Conversation(
            messages=messages,
            origin=Origin("rows.jsonl", 1),
            context=some if draw.random() < 0.5 else frozenset(),
            wanted=frozenset(),
        )
        train_on: TrainOn = draw.choice(["assistant", "last", "all"])
        found = layout(short, conversation, train_on)
        assert found == layout(long, conversation, train_on)
        taken += isinstance(found, Layout)
    assert taken


class _Never:
    """Outlines of a template that has none."""

    def layout(self, *_: Any, **__: Any) -> None:
        return None


def test_most_rows_take_the_short_way() -> None:
    build = ChatTemplate(tokenizer(), source=SOURCES["chatml"])
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    conversation = Conversation(messages=messages, origin=Origin("rows.jsonl", 1))

    def refuse(*_: Any, **__: Any) -> Layout:
        raise AssertionError("the long way was taken")

    first = build.layout(conversation)
    short = build._outlines.layout(conversation, (), train_on="assistant", long_way=refuse)
    assert short == first and short is not None
    assert [short.text[start:stop] for start, stop in short.spans] == ["4<|im_end|>"]
