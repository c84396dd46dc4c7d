"""What is trained, by choice: --train_on, switches of turns, thoughts of older answers, stop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkit.data import Conversation, Renderer, Row, read, to_example
from swiftkit.data.document import Origin
from swiftkit.data.tokenizer import generation_settings, prompt_ids, stop_ids
from swiftkit.errors import UserError
from tests.cases.toy import case, expected, template, tokenizer, trained_texts
from tests.chat_templates import THINKING

pytestmark = pytest.mark.compat

HERE = Origin("rows.jsonl", 1)


def talk(*contents: str | dict[str, Any], **columns: Any) -> Conversation:
    """Questions and answers in turn; a dict is a whole turn."""
    turns = [
        turn if isinstance(turn, dict) else {"role": "assistant" if index % 2 else "user", "content": turn}
        for index, turn in enumerate(contents)
    ]
    found = to_example(Row({"messages": turns, **columns}, HERE))
    assert isinstance(found, Conversation)
    return found


def bot(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def trained(
    example: Any, chat_template: str = "chatml", source: str | None = None, **knobs: Any
) -> list[str]:
    toy = tokenizer()
    renderer = Renderer(toy, chat_template=None if source else chat_template, **knobs)
    renderer._source = source or renderer._source
    (document,) = renderer.documents([example])
    return trained_texts(document, toy)


def test_last_is_what_follows_the_last_answered_question() -> None:
    assert trained(talk("a", "b", "c", "d"), train_on="last") == ["d<|im_end|>"]
    assert trained(talk("a", "b", "c", "d", "e"), train_on="last") == ["d<|im_end|>"]
    steps = talk("a", "b", "c", bot("d"), bot("e"))
    assert trained(steps, train_on="last") == ["d<|im_end|>", "e<|im_end|>"]


def test_all_is_every_token() -> None:
    whole = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert trained(talk("a", "b"), train_on="all") == [whole]
    for train_on, texts in (("all", ["ab</s>"]), ("last", ["b</s>"]), ("assistant", ["b</s>"])):
        completion = to_example(Row({"prompt": "a", "completion": "b"}, HERE))
        assert trained(completion, train_on=train_on) == texts
        assert trained(to_example(Row({"text": "ab"}, HERE)), train_on=train_on) == ["ab</s>"]


def test_a_turn_that_says_so_is_trained_or_not() -> None:
    off, on = {"train": False}, {"train": True}
    assert trained(talk("a", bot("b", **off), "c", "d")) == ["d<|im_end|>"]
    assert trained(talk("a", bot("b", **on), "c", "d"), train_on="last") == ["b<|im_end|>", "d<|im_end|>"]
    assert trained(talk("a", "b", "c", bot("d", **off)), train_on="last") == []
    asked = {"role": "user", "content": "c", **on}
    assert trained(talk("a", "b", asked, "d")) == ["b<|im_end|>", "c<|im_end|>", "d<|im_end|>"]
    assert trained(talk("a", bot("b", **off), "c", "d"), train_on="all") == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n",
    ]
    assert trained(talk("a", "b", {"role": "user", "content": "c", **off}, "d"), train_on="all") == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\n",
        "\n<|im_start|>assistant\nd<|im_end|>\n",
    ]
    assert trained(talk("a", bot("b", train=None), "c", "d")) == ["b<|im_end|>", "d<|im_end|>"]


def test_case_13_thoughts_of_older_answers_by_choice() -> None:
    known = expected("13-thinking-history")
    (row,) = read(case("13-thinking-history.jsonl"))
    for choice, suffix in (("template", "as_template"), ("keep", "if_history_kept")):
        renderer = Renderer(tokenizer(), chat_template=template("thinking"), thinking_history=choice)
        (document,) = renderer.documents([to_example(row)])
        assert tokenizer().decode(document.ids) == known[f"rendered_{suffix}"]
        assert trained_texts(document, tokenizer()) == known[f"supervised_text_{suffix}"]
        notes = renderer.layout(to_example(row)).notes
        assert notes == (
            () if choice == "keep" else ("thoughts of older answers that the chat template leaves out",)
        )


@pytest.mark.parametrize("apart", [False, True])
def test_kept_thoughts_of_a_template_that_writes_empty_ones(apart: bool) -> None:
    def answer(thought: str, words: str) -> dict[str, Any]:
        if apart:
            return bot(words, reasoning_content=thought)
        return bot(f"<think>\n{thought}\n</think>\n\n{words}")

    conversation = talk("a", answer("x", "b"), "c", answer("y", "d"), "e", "f")
    assert trained(conversation, source=THINKING) == [
        "b<|im_end|>",
        "d<|im_end|>",
        "<think>\n\n</think>\n\nf<|im_end|>",
    ]
    assert trained(conversation, source=THINKING, thinking_history="keep") == [
        "<think>\nx\n</think>\n\nb<|im_end|>",
        "<think>\ny\n</think>\n\nd<|im_end|>",
        "<think>\n\n</think>\n\nf<|im_end|>",
    ]
    shown = talk("a", answer("x", "b"))
    for choice in ("template", "keep"):
        assert trained(shown, source=THINKING, thinking_history=choice) == [
            "<think>\nx\n</think>\n\nb<|im_end|>"
        ]


def test_thoughts_before_a_call_are_trained() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}
    turns = [
        {"role": "user", "content": "q"},
        bot("", reasoning_content="hm", tool_calls=[call]),
        {"role": "tool", "content": "r"},
        bot("<think>\nso\n</think>\n\nend"),
    ]
    assert trained(talk(*turns), source=THINKING) == [
        "<think>\nhm\n</think>\n\n<tool_call>\n"
        '{"name": "f", "arguments": {"a": "x"}}\n</tool_call><|im_end|>',
        "<think>\nso\n</think>\n\nend<|im_end|>",
    ]


def test_case_11_saved_settings_stop_where_the_model_learnt_to(tmp_path: Path) -> None:
    toy = tokenizer()
    toy.chat_template = Path(template("alternate-nosystem")).read_text(encoding="utf-8")
    wanted = set(expected("11-turn-end-not-eos")["saved_stop_ids_include"])
    assert stop_ids(toy, tmp_path) == wanted
    assert generation_settings(toy, tmp_path)["eos_token_id"] == [2, 6]
    own = {"eos_token_id": 4, "temperature": 0.6, "pad_token_id": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    settings = generation_settings(toy, tmp_path)
    assert settings == {**settings, "eos_token_id": [2, 4, 6], "temperature": 0.6, "pad_token_id": 3}


def test_a_prompt_has_its_system_words_where_training_has_them() -> None:
    toy = tokenizer()
    toy.chat_template = Path(template("alternate-nosystem")).read_text(encoding="utf-8")
    asked = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "sky colour?"}]
    (row, *_) = read(case("08-no-system-role.jsonl"))
    renderer = Renderer(toy)
    (document,) = renderer.documents([to_example(row)])
    prompt = prompt_ids(toy, asked)
    assert document.ids[: len(prompt)].tolist() == prompt
    assert not document.trained[: len(prompt)].any() and document.trained[len(prompt)]
    with pytest.raises(UserError, match="no system turn"):
        prompt_ids(toy, [*asked, {"role": "system", "content": "late"}])
