"""From a row to what a preference is made of: two answers to one prompt, or one answer with a label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from swiftkit.data.content import listed, shortly, text_of
from swiftkit.data.conversation import Conversation, Message
from swiftkit.data.document import Origin, RowError
from swiftkit.data.lines import Row
from swiftkit.data.shapes import PREFERENCES, Completion, Example, PlainText, renamed, to_example

MARGIN, LABEL = "margin", "label"
QUESTIONS = ("question", "query", "instruction")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A row of preferences.

    Attributes:
        answers: the chosen and the rejected one, each with its prompt; of a labelled row its only one.
        origin: the row's file and line.
        margin: by how much the chosen answer should win.
        good: the label of a labelled row.
    """

    answers: tuple[Example, ...]
    origin: Origin
    margin: float = 0.0
    good: bool = True


def to_pair(row: Row, columns: Mapping[str, str] | None = None) -> Preference:
    """Two answers to one prompt, from any shape that people have.

    Those are `chosen` and `rejected` (texts, or lists of messages) with or without `prompt`, `question`,
    `query` or `instruction`; and `messages`, `conversations` or `query` with `response`, beside
    `rejected_response` or `rejected_messages`.

    Raises:
        RowError: no known shape, or a side that is missing or empty.
    """
    value, origin = renamed(row.value, columns), row.origin
    filled = {key for key, entry in value.items() if entry is not None}
    present = next((keys for keys in PREFERENCES if filled.issuperset(keys)), None)
    present = present or next((keys for keys in PREFERENCES if value.keys() >= set(keys)), None)
    if present is None:
        raise origin.error(_no_pair(value))
    missing = next((key for key in present if value[key] is None), None)
    if missing is not None:
        raise origin.error(f"{missing!r} is null or empty; it needs a value")
    sides = _from_chosen(value, origin) if "chosen" in present else _from_rejected(value, present, origin)
    rest = {key: value[key] for key in ("system", "tools", "history") if value.get(key) is not None}
    names = ("chosen", "rejected") if "chosen" in present else (present[0], present[-1])
    answers = [
        _example(replace(row, value={**rest, **side}), name) for side, name in zip(sides, names, strict=True)
    ]
    return Preference(answers=_apart(answers, names, origin), origin=origin, margin=_margin(value, origin))


def to_labelled(row: Row, columns: Mapping[str, str] | None = None) -> Preference:
    """One answer with a boolean `label`, in any shape of a row for sft.

    Raises:
        RowError: no label, or no known shape.
    """
    value, origin = renamed(row.value, columns), row.origin
    if LABEL not in value:
        pair = any(value.keys() >= set(keys) for keys in PREFERENCES)
        mend = "; pairs are for the other losses" if pair else ""
        raise origin.error(
            f"no 'label'; --loss_type kto learns from answers with a label, true or false{mend}"
        )
    label = value[LABEL]
    words = {"true": True, "false": False}
    label = words.get(label.strip().lower(), label) if isinstance(label, str) else label
    if label not in (0, 1):
        raise origin.error(f"'label' is true or false, not {shortly(value[LABEL])}")
    rest = {key: entry for key, entry in value.items() if key != LABEL}
    return Preference(answers=(to_example(replace(row, value=rest)),), origin=origin, good=bool(label))


def _from_chosen(value: Mapping[str, Any], origin: Origin) -> list[dict[str, Any]]:
    """Each side as a row for sft."""
    chosen, rejected = value["chosen"], value["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise origin.error("'chosen' and 'rejected' are both texts, or both lists of messages")
    question = next((key for key in QUESTIONS if value.get(key) is not None), None)
    prompt = value.get("prompt")
    if not isinstance(chosen, str):
        asked = [] if prompt is None and question is None else _asked(prompt, value, question, origin)
        return [
            {"messages": asked + listed(side, name, origin)}
            for side, name in ((chosen, "chosen"), (rejected, "rejected"))
        ]
    if isinstance(prompt, list):
        return [{"prompt": prompt, "completion": side} for side in (chosen, rejected)]
    if prompt is None and question is not None:
        words = {"question": text_of(value[question], question, origin)}
        if question == "instruction" and value.get("input"):
            words["question"] += "\n" + text_of(value["input"], "input", origin)
        return [{**words, "answer": side} for side in (chosen, rejected)]
    if prompt is None:
        cut = _common(chosen, rejected)
        return [{"prompt": side[:cut], "completion": side[cut:]} for side in (chosen, rejected)]
    return [{"prompt": prompt, "completion": side} for side in (chosen, rejected)]


def _asked(prompt: Any, value: Mapping[str, Any], question: str | None, origin: Origin) -> list[Any]:
    """The messages in front of two lists of messages."""
    if isinstance(prompt, list):
        return prompt
    words = text_of(value[question] if prompt is None and question else prompt, "prompt", origin)
    # Many data sets repeat the prompt as the first message of each side.
    begun = all(
        isinstance(side, list) and side and isinstance(side[0], dict) and side[0].get("role") != "assistant"
        for side in (value["chosen"], value["rejected"])
    )
    return [] if begun else [{"role": "user", "content": words}]


def _from_rejected(value: Mapping[str, Any], keys: tuple[str, ...], origin: Origin) -> list[dict[str, Any]]:
    """Each side as a row for sft, of a row whose good answer stands in an ordinary shape."""
    if keys[-1] == "rejected_messages":
        return [{"messages": value["messages"]}, {"messages": value["rejected_messages"]}]
    rejected = text_of(value["rejected_response"], "rejected_response", origin)
    if keys[0] == "query":
        return [{"query": value["query"], "response": side} for side in (value["response"], rejected)]
    role, words = ("role", "content") if keys[0] == "messages" else ("from", "value")
    turns = listed(value[keys[0]], "conversation", origin)
    if not turns or not isinstance(turns[-1], dict):
        raise origin.error(
            f"{keys[0]!r} needs an answer at its end, which 'rejected_response' stands against"
        )
    last = {role: turns[-1].get(role), words: rejected}
    return [{keys[0]: turns}, {keys[0]: [*turns[:-1], last]}]


def _common(chosen: str, rejected: str) -> int:
    """Characters of the prompt that two whole texts begin with: up to a space; none where they are one."""
    if chosen == rejected:
        return 0
    shorter = min(len(chosen), len(rejected))
    same = next((place for place in range(shorter) if chosen[place] != rejected[place]), shorter)
    same = min(same, shorter - 1)
    while same > 0 and not chosen[same - 1].isspace():
        same -= 1
    return same


def _example(row: Row, name: str) -> Example:
    try:
        return to_example(row)
    except RowError as error:
        raise row.origin.error(f"in {name!r}: {error.reason}") from None


def _apart(answers: list[Example], names: tuple[str, str], origin: Origin) -> tuple[Example, Example]:
    """What both sides begin with is shown and not trained."""
    chosen, rejected = answers
    if isinstance(chosen, Conversation) and isinstance(rejected, Conversation):
        own, other = chosen.messages, rejected.messages
        shown = _same_messages(own, other)
        found = [_shown(side, shown, name) for side, name in zip((chosen, rejected), names, strict=True)]
        return found[0], found[1]
    if isinstance(chosen, PlainText) or isinstance(rejected, PlainText):
        raise origin.error("a preference needs a prompt and answers")
    assert isinstance(chosen, Completion) and isinstance(rejected, Completion), "sides have one shape"
    return chosen, rejected


def _same_messages(own: list[Message], other: list[Message]) -> int:
    """Messages that both begin with; the last one of each is always its own."""
    most = min(len(own), len(other)) - 1
    return next((place for place in range(most) if own[place] != other[place]), most)


def _shown(side: Conversation, shown: int, name: str) -> Conversation:
    if not any(message["role"] == "assistant" for message in side.messages[shown:]):
        raise side.origin.error(f"{name!r} has no answer of the assistant behind what both sides begin with")
    return replace(
        side,
        context=side.context | frozenset(range(shown)),
        wanted=frozenset(place for place in side.wanted if place >= shown),
    )


def _margin(value: Mapping[str, Any], origin: Origin) -> float:
    margin = value.get(MARGIN)
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise origin.error(f"'margin' is a number, not {shortly(margin)}")
    return float(margin)


def _no_pair(value: Mapping[str, Any]) -> str:
    for needed in PREFERENCES:
        lacking = [key for key in needed if key not in value]
        if len(lacking) == 1 and len(needed) == 2 and any(key in value for key in ("chosen", "rejected")):
            return f"{lacking[0]!r} is missing; a pair needs a chosen and a rejected answer"
    keys = ", ".join(map(repr, value)) or "none"
    known = "; ".join(" + ".join(needed) for needed in PREFERENCES)
    return f"no pair of answers with the keys {keys}; known are: {known}, each with an optional prompt"
