"""From a row of any known shape to a conversation, a prompt with its completion, or plain text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

from swiftkit.data.content import check_answer, check_characters, listed, shortly, text_of
from swiftkit.data.conversation import Conversation, Message, completed, conversation
from swiftkit.data.document import Origin
from swiftkit.data.lines import Row
from swiftkit.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Raw text without a template: the completion is trained, the prompt is not."""

    prompt: str
    completion: str
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """Raw text without a template, all of it trained."""

    text: str
    origin: Origin


Example: TypeAlias = Conversation | Completion | PlainText
Convert: TypeAlias = Callable[[Row], Example]


def to_example(row: Row, columns: Mapping[str, str] | None = None) -> Example:
    """Finds the row's shape by its keys and gives it its one meaning.

    Args:
        row: as it was read.
        columns: from the row's own names to those of a shape (see `column_names`); such shapes come first.

    Raises:
        RowError: no known shape, a null or empty text where one is needed, an unknown role.
    """
    named = {name for key, name in (columns or {}).items() if key in row.value}
    if named:
        row = replace(row, value=renamed(row.value, columns))
    return _shape_of(row, named)(row)


def renamed(value: Mapping[str, Any], columns: Mapping[str, str] | None) -> dict[str, Any]:
    """A row's value under the names of the shapes; a column that is named takes the place of a known one."""
    columns = columns or {}
    rest = {key: entry for key, entry in value.items() if key not in columns}
    return rest | {name: value[key] for key, name in columns.items() if key in value}


def column_names(written: Mapping[str, str]) -> dict[str, str]:
    """`--columns` as a mapping from the rows' names to ours, whichever way round each pair is written.

    Raises:
        UserError: neither word of a pair is a column of a known shape, or one is named twice.
    """
    known = {key for needed in (*SHAPES, *PREFERENCES) for key in needed}
    known |= {"system", "history", "tools", "input", "margin", "label"}
    found: dict[str, str] = {}
    for first, second in written.items():
        ours, theirs = (first, second) if first in known else (second, first)
        if ours not in known:
            raise UserError(
                f"--columns: neither {first!r} nor {second!r} is a column that is read; "
                f"those are {', '.join(sorted(known))}"
            )
        if theirs in found or ours in found.values():
            raise UserError(f"--columns: {theirs!r} for {ours!r} is named twice")
        found[theirs] = ours
    return found


def _shape_of(row: Row, named: Set[str]) -> Convert:
    filled = frozenset([key for key, value in row.value.items() if value is not None])
    convert = _shape_of_keys(filled, frozenset(named))
    if convert is None:
        raise row.origin.error(_no_shape(row, filled, named))
    return convert


@lru_cache(maxsize=1024)  # rows of a data set have few kinds of keys
def _shape_of_keys(filled: frozenset[str], named: frozenset[str]) -> Convert | None:
    """The shape of rows that have values for these keys; None where they are refused."""
    if any(filled.issuperset(needed) for needed in PREFERENCES):
        return None
    return next((SHAPES[needed] for needed in _in_order(named) if filled.issuperset(needed)), None)


def _in_order(named: Set[str]) -> list[tuple[str, ...]]:
    """Shapes with a column that was named, then the others, each in the table's order."""
    return sorted(SHAPES, key=lambda needed: named.isdisjoint(needed))


def _no_shape(row: Row, filled: Set[str], named: Set[str]) -> str:
    for needed in PREFERENCES:
        if filled >= set(needed):
            return _not_for_sft(needed, row.value)
    for needed in _in_order(named):
        if row.value.keys() >= set(needed):
            null = next(key for key in needed if key not in filled)
            return f"{null!r} is null or empty; it needs a value"
    keys = ", ".join(map(repr, row.value)) or "none"
    known = "; ".join(" + ".join(needed) for needed in SHAPES)
    return (
        f"no known row shape with the keys {keys}; known are: {known}; "
        """--columns '{"question": "MINE"}' tells which column is which"""
    )


def _not_for_sft(needed: tuple[str, ...], value: Mapping[str, Any]) -> str:
    ours = "completion" if isinstance(value.get("chosen"), str) else "messages"
    mend = f"""--columns '{{"{ours}": "chosen"}}'""" if "chosen" in needed else f"take {needed[-1]!r} out"
    return (
        f"a preference row ({' + '.join(needed)}): dpo and reward models learn from these, sft has no use "
        f"for a rejected answer; to train on the good one, {mend}"
    )


def _from_messages(row: Row) -> Conversation:
    return conversation(row.value, row.value["messages"], row.origin, columnar=row.columnar)


def _from_sharegpt(row: Row) -> Conversation:
    turns = listed(row.value["conversations"], "conversation", row.origin)
    turns = [_sharegpt_turn(turn) if isinstance(turn, dict) else turn for turn in turns]
    return conversation(row.value, turns, row.origin, columnar=row.columnar)


def _sharegpt_turn(turn: dict[str, Any]) -> dict[str, Any]:
    renamed = {"from": "role", "value": "content"}
    return {renamed.get(key, key): value for key, value in turn.items()}


def _from_prompt(row: Row) -> Example:
    prompt, completion, origin = row.value["prompt"], row.value["completion"], row.origin
    if isinstance(prompt, str) and isinstance(completion, str):
        check_answer(completion, "completion", origin)
        check_characters(prompt + completion, origin)
        return Completion(prompt=prompt, completion=completion, origin=origin)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answered = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    for key, turns in (("prompt", asked), ("completion", answered)):
        if not isinstance(turns, list):
            raise origin.error(f"{key!r} is text or a list of messages, not {shortly(turns)}")
    return conversation(row.value, asked + answered, origin, shown=len(asked), columnar=row.columnar)


def _asked(question: str, answer: str, *, extra: str | None = None) -> Convert:
    """A shape of one question column and one answer column, with optional system and history."""

    def convert(row: Row) -> Conversation:
        value, origin = row.value, row.origin
        words = text_of(value[question], question, origin)
        if extra and value.get(extra):
            words = "\n".join(part for part in (words, text_of(value[extra], extra, origin)) if part)
        answered = text_of(value[answer], answer, origin)
        check_answer(answered, answer, origin)
        turns = [{"role": "user", "content": words}, {"role": "assistant", "content": answered}]
        if value.get("history") is None:
            return completed(Conversation(messages=turns, origin=origin), value, columnar=row.columnar)
        turns = _history(value["history"], origin) + turns
        return conversation(value, turns, origin, columnar=row.columnar)

    return convert


def _history(history: Any, origin: Origin) -> list[Message]:
    pairs = listed(history, "'history'", origin)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise origin.error("'history' is a list of [question, answer] pairs")
    return [
        {"role": role, "content": words}
        for pair in pairs
        for role, words in zip(("user", "assistant"), pair, strict=True)
    ]


def _from_text(row: Row) -> PlainText:
    text = text_of(row.value["text"], "text", row.origin)
    check_answer(text, "text", row.origin)
    return PlainText(text=text, origin=row.origin)


SHAPES: dict[tuple[str, ...], Convert] = {
    ("messages",): _from_messages,
    ("conversations",): _from_sharegpt,
    ("prompt", "completion"): _from_prompt,
    ("instruction", "output"): _asked("instruction", "output", extra="input"),
    ("query", "response"): _asked("query", "response"),
    ("question", "answer"): _asked("question", "answer"),
    ("text",): _from_text,
}
PREFERENCES: tuple[tuple[str, ...], ...] = (
    ("chosen", "rejected"),
    ("messages", "rejected_response"),
    ("messages", "rejected_messages"),
    ("conversations", "rejected_response"),
    ("query", "response", "rejected_response"),
)
