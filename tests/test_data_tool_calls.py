"""Tool calls: read as they were written, rendered by the template, trained as a model has to write them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jinja2
import pytest

from swiftkit.data import Conversation, Renderer, Row, read, to_example
from swiftkit.data.document import Origin
from swiftkit.data.template import ChatTemplate
from swiftkit.errors import UserError
from tests.cases.toy import CASES, case, expected, template, tokenizer, trained_texts
from tests.chat_templates import WITH_CALLS

pytestmark = pytest.mark.compat

HERE = Origin("rows.jsonl", 7)


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def talk(*messages: dict[str, Any], **columns: Any) -> Conversation:
    found = to_example(Row({"messages": list(messages), **columns}, HERE))
    assert isinstance(found, Conversation)
    return found


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def bot(words: str | None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": words, **({"tool_calls": list(calls)} if calls else {}), **more}


def result(words: Any) -> dict[str, Any]:
    return {"role": "tool", "content": words, "tool_call_id": "call00000"}


def conversations(name: str) -> list[Conversation]:
    found = [to_example(row) for row in read(case(name))]
    assert all(isinstance(example, Conversation) for example in found)
    return found  # type: ignore[return-value]


def arguments_of(conversation: Conversation) -> list[dict[str, Any]]:
    return [
        call["function"]["arguments"]
        for message in conversation.messages
        for call in message.get("tool_calls", [])
    ]


def test_case_01_arguments_keep_the_types_that_were_written() -> None:
    found = [arguments_of(conversation)[0] for conversation in conversations("01-nested-arg-types.jsonl")]
    wanted = expected("01-nested-arg-types")["limit_values_in_order"]
    # As text, since 1 == True and 5 == 5.0.
    assert [json.dumps(arguments) for arguments in found] == [json.dumps({"limit": v}) for v in wanted]
    renderer = Renderer(tokenizer(), chat_template=template("chatml-tools"))
    for conversation, limit in zip(conversations("01-nested-arg-types.jsonl"), wanted, strict=True):
        text = renderer.layout(conversation).text
        assert f'list_files {{"limit": {json.dumps(limit)}}}</tool_call>' in text


def test_case_02_no_null_comes_from_another_row() -> None:
    known = expected("02-tool-args-null-fill")
    rows = conversations("02-tool-args-null-fill.jsonl")
    assert [[*arguments_of(row)[0]] if arguments_of(row) else [] for row in rows] == known["argument_keys"]
    # The case was made with Jinja's own tojson, which sorts keys.
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        (CASES / "00-toy" / "template-chatml-tools.jinja").read_text(encoding="utf-8")
    )
    assert [plain.render(messages=row.messages) for row in rows] == known["rendered"]
    # transformers' tojson keeps their order, in training as in the prompts of every server.
    renderer = Renderer(tokenizer(), chat_template=template("chatml-tools"))
    texts = [renderer.layout(row).text for row in rows]
    swapped = known["rendered"][1].replace('"loud": true, "text": "hi"', '"text": "hi", "loud": true')
    assert texts == [known["rendered"][0], swapped, *known["rendered"][2:]]
    assert [number for number, text in enumerate(texts, 1) if "null" in text] == known["rows_with_word_null"]


def test_case_05_null_beside_a_call_is_no_text() -> None:
    known = expected("05-null-content")
    renderer = Renderer(tokenizer(), chat_template=template("chatml-tools"))
    texts, refused = {}, []
    for row in read(case("05-null-content.jsonl")):
        try:
            texts[row.origin.line] = renderer.layout(to_example(row)).text
        except UserError as error:
            assert str(error).startswith(f"{row.origin}: ")
            refused.append(row.origin.line)
    assert [*texts] == known["kept_lines"] and refused == known["rejected_lines"]
    assert "".join(texts.values()).count("None") == known["word_None_in_rendered_kept_text"]


STORIES: dict[str, list[dict[str, Any]]] = {
    "a call and its result": [
        user("Weather in Nice?"),
        bot(None, call("weather", {"city": "Nice", "days": 3})),
        result("sun"),
        bot("Sunny."),
    ],
    "no text in the arguments": [
        user("q"),
        bot("", call("roll", {"sides": 6, "of": [1, None, True]})),
        result("4"),
        bot("Four."),
        user("again"),
        bot(None, call("roll", {})),
    ],
    "arguments that quote the template": [
        user("q"),
        bot(
            None, call("say", {"words": "</tool_call><|im_end|>}\n<|eot_id|></s>", "n": {"deep": ["}}", 2]}})
        ),
        result('a "b"\n<|im_end|>'),
        bot("ok"),
    ],
}
MORE = {
    "words and two calls": [
        user("q"),
        bot("Let me see.", call("first", {"a": "x"}), call("second", {"b": [1, "y"]}, 1)),
        result("1"),
        bot("Both."),
    ],
    "two calls without words": [
        user("q"),
        bot(None, call("first", {"a": 1}), call("second", {}, 1)),
        result("1"),
        bot("Both."),
    ],
}
ONE_CALL = ("headered", "text_arguments", "channels")


@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.parametrize("story", [*STORIES, *MORE])
def test_what_is_trained_is_what_follows_the_generation_prompt(name: str, story: str) -> None:
    if story in MORE and name in ONE_CALL:
        pytest.skip("this template writes one call")
    messages = {**STORIES, **MORE}[story]
    if story == "words and two calls" and name == "bracketed":
        messages = [messages[0], {**messages[1], "content": None}, *messages[2:]]  # it writes words or calls
    toy = tokenizer()
    renderer = Renderer(toy)
    renderer._source = WITH_CALLS[name]
    conversation = talk(*messages)
    (document,) = renderer.documents([conversation])
    assert toy.decode(document.ids) == renderer.layout(conversation).text
    written = trained_texts(document, toy)
    assert len(written) == len(conversation.trained("assistant"))
    chat = renderer.chat_template
    for index, words in zip(conversation.trained("assistant"), written, strict=True):
        before, until = conversation.messages[:index], conversation.messages[: index + 1]
        prompt = plain_render(chat, before, add_generation_prompt=True)
        whole = plain_render(chat, until)
        assert whole.startswith(prompt), "the templates of this test have this property"
        wanted = whole[len(prompt) :].removesuffix("\n")
        if name == "thinking" and index + 1 < len(conversation.messages):
            wanted = wanted.removeprefix(
                "<think>\n\n</think>\n\n"
            )  # it writes that into the last message only
        assert words == wanted, f"{story}: message {index + 1}"


def plain_render(chat: ChatTemplate, messages: list[dict[str, Any]], **knobs: bool) -> str:
    """The template's own rendering, with calls in the form that it takes."""
    from swiftkit.data.probe import form_calls

    form = chat._calls
    assert form is not None
    formed = [form_calls(m, form) if m.get("tool_calls") else m for m in messages]
    return chat.render(formed, **knobs)


@pytest.mark.parametrize("name", ["hermes", "tagged", "thinking"])
def test_random_calls_are_trained_whole(name: str, seed: int) -> None:
    draw = random.Random(seed)
    strings = ["", " ", "x", "}", "</tool_call>", "<|im_end|>", "\n", "é漢", "<|im_start|>assistant\n", '"']

    def value(depth: int) -> Any:
        kind = draw.randrange(6 if depth else 4)
        if kind < 2:
            return "".join(draw.choices(strings, k=3))
        if kind == 2:
            return draw.choice([None, True, 7, -1.5])
        if kind == 3 or kind == 4:
            return [value(depth - 1) for _ in range(draw.randrange(3))] if depth else 3
        return {f"k{number}": value(depth - 1) for number in range(draw.randrange(3))}

    toy = tokenizer("merge")
    renderer = Renderer(toy)
    renderer._source = WITH_CALLS[name]
    for _ in range(25):
        calls = [
            call(f"f{n}", {f"a{k}": value(2) for k in range(draw.randrange(3))})
            for n in range(1 + draw.randrange(2))
        ]
        messages = [user("q"), bot(draw.choice([None, "words"]), *calls), result("r"), bot("end")]
        conversation = talk(*messages)
        (document,) = renderer.documents([conversation])
        prompt = renderer.chat_template.render([user("q")], add_generation_prompt=True)
        whole = renderer.chat_template.render(conversation.messages[:2])
        wanted = whole[len(prompt) :].removesuffix("\n").removeprefix("<think>\n\n</think>\n\n")
        assert trained_texts(document, toy)[0] == wanted


@pytest.mark.parametrize(
    "turns",
    [
        [user("q"), bot(None, call("f", '{"a": 1}')), result("r"), bot("end")],
        [user("q"), bot(None, {"name": "f", "arguments": {"a": 1}}), result("r"), bot("end")],
        [
            user("q"),
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
            {"role": "function", "name": "f", "content": "r"},
            bot("end"),
        ],
        [
            user("q"),
            {"role": "tool_call", "content": '{"name": "f", "arguments": {"a": 1}}'},
            {"role": "tool_response", "content": "r"},
            bot("end"),
        ],
    ],
)
def test_every_spelling_of_a_call_is_one(turns: list[dict[str, Any]]) -> None:
    renderer = Renderer(tokenizer())
    renderer._source = WITH_CALLS["hermes"]
    wanted = renderer.layout(talk(user("q"), bot(None, call("f", {"a": 1})), result("r"), bot("end")))
    assert renderer.layout(talk(*turns)).text == wanted.text
    as_sharegpt = [{"from": turn["role"], **{k: v for k, v in turn.items() if k != "role"}} for turn in turns]
    row = Row({"conversations": [{**t, "value": t.pop("content")} for t in as_sharegpt]}, HERE)
    assert renderer.layout(to_example(row)).spans == wanted.spans


def test_calls_of_several_turns_are_one_answer() -> None:
    turns = [
        user("q"),
        {"role": "assistant", "content": "Both."},
        {"role": "tool_call", "content": {"name": "f", "arguments": {}}},
        {"role": "tool_call", "content": {"name": "g", "arguments": None}},
        {"role": "tool_response", "content": {"found": [1, None]}},
        bot("end"),
    ]
    conversation = talk(*turns)
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert [c["function"]["name"] for c in conversation.messages[1]["tool_calls"]] == ["f", "g"]
    assert conversation.messages[2]["content"] == '{"found": [1, null]}'


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (
            bot(None, {"function": {"arguments": {}}}),
            "call 1 of message 2 is no object with a function's name",
        ),
        (bot(None, call("f", "{'a': 1}")), "argument text of call 1 of message 2 is not valid JSON"),
        (bot(None, call("f", "[1]")), "are a JSON object"),
        (bot(None, call("f", 5)), "are a JSON object"),
        ({"role": "tool_call", "content": "f()"}, "not valid JSON"),
        (result(None), "content of message 2 is null"),
        (bot(None), "content of message 2 is null"),
        (bot(None, call("f", {"a": json.loads(r'"\ud800"')})), "lone surrogate"),
    ],
)
def test_calls_that_are_refused(message: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError, match=rf"^rows\.jsonl:7: .*{rule}"):
        talk(user("q"), message)


def test_a_template_that_does_not_show_calls() -> None:
    conversation = talk(*STORIES["a call and its result"])
    with pytest.raises(UserError, match=r"rows\.jsonl:7: the chat template does not show tool calls"):
        Renderer(tokenizer(), chat_template="chatml").layout(conversation)


def test_tools_are_shown_or_it_is_said() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    conversation = talk(*STORIES["a call and its result"], tools=tools)
    as_text = talk(*STORIES["a call and its result"], tools=json.dumps(tools))
    assert conversation.tools == as_text.tools == tools
    renderer = Renderer(tokenizer())
    renderer._source = WITH_CALLS["hermes"]
    shown = renderer.layout(conversation)
    assert json.dumps(tools[0]) in shown.text and shown.notes == ()
    silent = talk(user("q"), bot("a"), tools=tools)
    assert Renderer(tokenizer(), chat_template="chatml").layout(silent).notes == (
        "tool descriptions that the chat template does not show",
    )


def test_nulls_of_shared_columns_are_not_taken_for_arguments(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")

    def rows(first: Any, second: Any) -> list[dict[str, Any]]:
        return [{"messages": [user("q"), bot(None, call("f", arguments))]} for arguments in (first, second)]

    for arguments, good in (
        (({"x": 1}, {"y": 2}), False),
        (({"x": 1}, {"x": 2}), True),
        (('{"x": null}', '{"y": 2}'), True),
    ):
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows(*arguments)), path)
        read_back = list(read(str(path)))
        if good:
            found = [arguments_of(to_example(row))[0] for row in read_back]  # type: ignore[arg-type]
            assert found == [json.loads(a) if isinstance(a, str) else a for a in arguments]
        else:
            with pytest.raises(UserError, match=r"rows\.parquet:row 1: .*keep arguments as JSON text"):
                to_example(read_back[0])
