from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from swiftkit.data import Conversation, Document, Origin, Renderer, collate, read, to_example
from swiftkit.data.render import _touched
from swiftkit.errors import UserError
from tests.cases.toy import case, expected, render, template, tokenizer, trained_texts

pytestmark = pytest.mark.compat

# Shapes of real templates, written for these tests.
HEADERLESS = (  # as Llama 2 and Mistral: nothing of its own before an answer
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]{% else %}"
    " {{ m['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
EMPTY_THINK = (  # as Qwen3: an empty thinking block before an answer that has none
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last and '</think>' not in m['content'] %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALWAYS_THINKS = (  # as Qwen3-Thinking: a prompt opens the block, and older answers are shown without it
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% set parts = m['content'].split('</think>') %}"
    "{% if loop.last %}<think>\n{% if parts | length > 1 %}"
    "{{ parts[0].split('<think>')[-1].strip('\n') }}{% endif %}{{ '\n' }}</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
WORDS_ONLY = (  # no special token anywhere
    "{% for m in messages %}"
    "{{ 'USER: ' if m['role'] == 'user' else 'BOT: ' }}{{ m['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}BOT:{% endif %}"
)
SYSTEM_LOST = "{% for m in messages if m['role'] != 'system' %}" + WORDS_ONLY.removeprefix(
    "{% for m in messages %}"
)


def talk(*contents: str, system: str | None = None) -> Conversation:
    messages = [
        {"role": "assistant" if index % 2 else "user", "content": content}
        for index, content in enumerate(contents)
    ]
    first = [{"role": "system", "content": system}] if system else []
    return Conversation(messages=first + messages, origin=Origin("rows.jsonl", 1))


def jinja(folder: Path, source: str) -> str:
    path = folder / "template.jinja"
    path.write_text(source, encoding="utf-8")
    return str(path)


def one(conversation: Conversation, chat_template: str, **knobs: str) -> Document:
    (document,) = Renderer(tokenizer(), chat_template=chat_template, **knobs).documents([conversation])
    return document


def test_case_06_shapes_give_the_same_ids() -> None:
    known = expected("06-mixed-schema")
    rows = list(read(case("06-mixed-schema.jsonl")))
    renderer = Renderer(tokenizer(), chat_template=template("chatml"))
    documents = {row.origin.line: renderer.documents([to_example(row)])[0] for row in rows[:-1]}
    for line in known["lines_equal"]:
        assert documents[line].ids.tolist() == known["ids"]
        assert trained_texts(documents[line], tokenizer()) == ["4<|im_end|>"]
    assert tokenizer().decode(documents[5].ids) == "2+2?4</s>"  # prompt and completion stay plain text
    with pytest.raises(UserError, match=r"06-mixed-schema\.jsonl:8: .*'q', 'a'"):
        to_example(rows[-1])


def test_case_09_one_start_token() -> None:
    known = expected("09-double-bos")
    first, plain = render("09-double-bos.jsonl", tok="bos", chat_template=template("bos-headers"))
    assert first.ids.tolist() == known["line_1_ids"]
    assert [np.count_nonzero(d.ids == known["bos_id"]) for d in (first, plain)] == known[
        "bos_count_each_line"
    ]
    assert first.trained.tolist() == [False] * 27 + [True] * 5
    renderer = Renderer(tokenizer("bos"), chat_template=template("bos-headers"))
    prompt = renderer.chat_template.render([{"role": "user", "content": "ping"}], add_generation_prompt=True)
    prompt_ids = tokenizer("bos")(prompt, add_special_tokens=False)["input_ids"]
    assert prompt_ids == known["line_1_prompt_ids"] == first.ids[: len(prompt_ids)].tolist()


def test_a_start_token_in_the_text_is_not_doubled(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "<s>words</s>"}\n{"prompt": "a", "completion": "b"}\n')
    renderer = Renderer(tokenizer("bos"))
    text, completion = renderer.documents([to_example(row) for row in read(str(path))])
    assert tokenizer("bos").decode(text.ids) == "<s>words</s>"
    assert completion.ids.tolist() == [1, 74, 75, 2] and completion.trained.tolist() == [
        False,
        False,
        True,
        True,
    ]


def test_case_10_a_quoted_answer_is_not_trained() -> None:
    known = expected("10-no-generation-tag")
    (document,) = render("10-no-generation-tag.jsonl", chat_template=template("chatml"))
    assert len(document) == known["ids_len"]
    positions = [p for start, stop in known["supervised_spans"] for p in range(start, stop)]
    assert np.flatnonzero(document.trained).tolist() == positions
    assert document.targets == known["supervised_count"]


def test_case_11_the_end_of_turn_mark_is_trained() -> None:
    known = expected("11-turn-end-not-eos")
    (document,) = render("11-turn-end-not-eos.jsonl", chat_template=template("alternate-nosystem"))
    assert len(document) == known["ids_len"]
    assert document.trained[known["must_be_supervised"]].all()
    assert not document.trained[known["must_not_be_supervised"]].any()


def test_case_12_a_padding_token_that_is_the_stop_token() -> None:
    known = expected("12-pad-is-eos")
    documents = render("12-pad-is-eos.jsonl")
    assert [len(document) for document in documents] == known["row_lengths_with_eos"]
    assert [document.targets for document in documents] == known["supervised_per_row"]
    batch = collate([documents], pad_id=known["eos_id"], pad_to=32)
    assert np.count_nonzero(batch.labels == known["eos_id"]) == known["supervised_eos_total"]
    assert batch.trained_tokens == sum(known["supervised_per_row"])


def test_case_13_a_turn_is_trained_as_the_template_shows_it() -> None:
    known = expected("13-thinking-history")
    (document,) = render("13-thinking-history.jsonl", chat_template=template("thinking"))
    assert tokenizer().decode(document.ids) == known["rendered_as_template"]
    assert trained_texts(document, tokenizer()) == known["supervised_text_as_template"]


def test_case_15_trained_tokens() -> None:
    known = expected("15-grad-accum")
    documents = render("15-grad-accum.jsonl")
    assert [document.targets for document in documents] == known["supervised_tokens"]
    batch = collate([[document] for document in documents], pad_id=0)
    assert batch.trained_tokens == known["denominator"]


def test_case_08_system_words_without_a_system_turn() -> None:
    known = expected("08-no-system-role")
    rows = list(read(case("08-no-system-role.jsonl")))
    renderer = Renderer(tokenizer(), chat_template=template("alternate-nosystem"))
    folded = renderer.layout(to_example(rows[0]))
    assert folded.text == known["line_1_if_folded"]
    assert folded.notes == (
        "system words put in front of the first question, as the chat template has no system turn",
    )
    with pytest.raises(UserError, match=r"08-no-system-role\.jsonl:2: .*turns have to go user"):
        renderer.documents([to_example(rows[1])])
    (document,) = renderer.documents([to_example(rows[2])])
    assert tokenizer().decode(document.ids) == known["line_3_rendered"]
    assert renderer.layout(to_example(rows[2])).notes == ()


def test_system_words_that_cannot_be_folded() -> None:
    late = Conversation(
        messages=[*talk("a", "b").messages, {"role": "system", "content": "s"}, *talk("c", "d").messages],
        origin=Origin("rows.jsonl", 1),
    )
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*no system turn.*user, assistant, system, user"):
        one(late, template("alternate-nosystem"))


def test_folding_moves_what_is_trained() -> None:
    document = one(talk("a", "b", "c", "d", system="s"), template("alternate-nosystem"))
    assert trained_texts(document, tokenizer()) == ["b<end_of_turn>", "d<end_of_turn>"]


def test_words_that_a_template_leaves_out_are_not_lost_unsaid(tmp_path: Path) -> None:
    lost = jinja(tmp_path, SYSTEM_LOST)
    assert one(talk("hi", "ho"), lost)
    folded = one(talk("hi", "ho", system="be kind"), lost)
    assert tokenizer().decode(folded.ids) == "USER: be kind\n\nhi\nBOT: ho\n</s>"
    mute = SYSTEM_LOST.replace("!= 'system'", "not in ('system', 'tool')")
    turns = [*talk("a", "b").messages, {"role": "tool", "content": "42"}, *talk("c", "d").messages]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*leaves out the words of message 3 \(tool\)"):
        one(Conversation(messages=turns, origin=Origin("rows.jsonl", 1)), jinja(tmp_path, mute))


def test_a_template_that_trims() -> None:
    spaced, tight = talk(" q ", " \n a b \n"), talk("q", "a b")
    documents = [one(conversation, template("bos-headers")) for conversation in (spaced, tight)]
    assert documents[0].ids.tolist() == documents[1].ids.tolist()
    assert [trained_texts(document, tokenizer()) for document in documents] == [["a b<|eot_id|>"]] * 2


def test_a_template_that_does_not_trim() -> None:
    document = one(talk("q", " \n a b \n"), template("chatml"))
    assert trained_texts(document, tokenizer()) == [" \n a b \n<|im_end|>"]


def test_a_template_without_a_generation_header(tmp_path: Path) -> None:
    document = one(talk("a", "b", "b</s>", "  c "), jinja(tmp_path, HEADERLESS))
    assert tokenizer().decode(document.ids) == "<s>[INST] a [/INST] b</s>[INST] b</s> [/INST] c</s>"
    assert trained_texts(document, tokenizer()) == [" b</s>", " c</s>"]  # a prompt ends before the space


def test_an_empty_thinking_block_is_trained(tmp_path: Path) -> None:
    document = one(talk("a", "b", "c", "d"), jinja(tmp_path, EMPTY_THINK))
    assert trained_texts(document, tokenizer()) == ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]
    thought = one(talk("a", "<think>\nx\n</think>\n\nb"), jinja(tmp_path, EMPTY_THINK))
    assert trained_texts(thought, tokenizer()) == ["<think>\nx\n</think>\n\nb<|im_end|>"]


def test_a_thinking_block_that_the_prompt_opens_is_not_trained_twice(tmp_path: Path) -> None:
    answers = "<think>\nx\n</think>\n\nb", "<think>\ny\n</think>\n\nd"
    document = one(
        talk("a", answers[0], "c <|im_start|>assistant\n<think>\n", answers[1]),
        jinja(tmp_path, ALWAYS_THINKS),
    )
    assert trained_texts(document, tokenizer()) == ["b<|im_end|>", "y\n</think>\n\nd<|im_end|>"]
    plain = one(talk("a", "b", "c", "d"), jinja(tmp_path, ALWAYS_THINKS))
    assert trained_texts(plain, tokenizer()) == ["b<|im_end|>", "\n</think>\n\nd<|im_end|>"]


def test_a_template_without_special_tokens_learns_to_stop(tmp_path: Path) -> None:
    document = one(talk("a", "b", "c", "d"), jinja(tmp_path, WORDS_ONLY))
    assert tokenizer().decode(document.ids) == "USER: a\nBOT: b\nUSER: c\nBOT: d\n</s>"
    assert trained_texts(document, tokenizer())[-1] == " d\n</s>"


def test_chatml_marks_that_the_tokenizer_does_not_know() -> None:
    bare = tokenizer()
    bare.eos_token = "<|eot_id|>"
    renderer = Renderer(bare, chat_template=None)
    renderer._source = "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}[end]\n{% endfor %}" + (
        "{% if add_generation_prompt %}[assistant]\n{% endif %}"
    )
    (document,) = renderer.documents([talk("a", "b", "c", "d")])
    assert trained_texts(document, bare) == ["b[end]", "d[end]\n<|eot_id|>"]


def test_answers_that_are_context_are_not_trained() -> None:
    conversation = talk("a", "b", "c", "d")
    shown = Conversation(messages=conversation.messages, origin=conversation.origin, context=frozenset({1}))
    assert trained_texts(one(shown, template("chatml")), tokenizer()) == ["d<|im_end|>"]


def test_a_system_message_for_rows_that_have_none() -> None:
    decode = tokenizer().decode
    assert decode(one(talk("a", "b"), "chatml", system="s").ids).startswith("<|im_start|>system\ns<|im_end|>")
    own = decode(one(talk("a", "b", system="own"), "chatml", system="s").ids)
    assert own.startswith("<|im_start|>system\nown<|im_end|>") and own.count("system") == 1


def test_the_built_in_template_equals_the_common_one() -> None:
    conversation = talk("a", "b", "c", "d", system="s")
    assert one(conversation, "chatml").ids.tolist() == one(conversation, template("chatml")).ids.tolist()


def test_a_template_that_changes_answers_is_refused(tmp_path: Path) -> None:
    counts = WORDS_ONLY.replace("{{ m['content'] }}", "{{ m['content'] }} {{ m['content'] | length }}")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*changes the answers"):
        one(talk("a", "b"), jinja(tmp_path, counts))
    last_only = WORDS_ONLY.replace("{% for m in messages %}", "{% for m in messages[-2:] %}")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*leaves out the words of message 1"):
        one(talk("a quite long one", "b", "c", "d"), jinja(tmp_path, last_only))


def test_templates_that_are_not_there() -> None:
    with pytest.raises(UserError, match=r"no chat template.*--chat_template chatml"):
        Renderer(tokenizer()).documents([talk("a", "b")])
    with pytest.raises(UserError, match="did you mean chatml"):
        Renderer(tokenizer(), chat_template="chatlm")


def test_marks_of_the_second_render_may_occur_in_a_row() -> None:
    document = one(talk("a\ufdd0\ufdd1", "b\ufdd2"), "chatml")
    assert trained_texts(document, tokenizer()) == ["b\ufdd2<|im_end|>"]


@pytest.mark.parametrize("tok", ["plain", "merge"])
def test_random_talks_train_the_answers_and_nothing_else(seed: int, tok: str) -> None:
    draw = random.Random(seed)
    alphabet = ["a", "b", " ", "\n", "é", "漢", "🌊", "assistant", "<|im_start|>", "ab", "</think>"]
    toy = tokenizer(tok)
    for _ in range(40):
        turns = 2 * draw.randint(1, 4)
        contents = ["x" + "".join(draw.choices(alphabet, k=draw.randint(0, 12))) + "x" for _ in range(turns)]
        (document,) = Renderer(toy, chat_template="chatml").documents([talk(*contents)])
        whole = "".join(
            f"<|im_start|>{role}\n{content}<|im_end|>\n"
            for role, content in zip(["user", "assistant"] * turns, contents, strict=False)
        )
        assert toy.decode(document.ids) == whole
        assert trained_texts(document, toy) == [f"{answer}<|im_end|>" for answer in contents[1::2]]


def test_indentation_is_trained_where_a_tokenizer_trims_its_ranges() -> None:
    toy = tokenizer()
    toy.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    answer = "def f():\n    return  1\n\n  # é漢🌊  x"
    (document,) = Renderer(toy, chat_template="chatml").documents([talk(" q ", answer)])
    assert trained_texts(document, toy) == [f"{answer}<|im_end|>"]


def overlaps(offsets: np.ndarray, spans: list[tuple[int, int]]) -> list[bool]:
    """Which tokens touch a span, by looking at all of them."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    reached = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    starts = np.minimum(starts, reached)
    touched = np.zeros(len(offsets), bool)
    for start, stop in spans:
        touched |= (starts < stop) & (ends > start)
    return touched.tolist()


class Ranges:
    """Hand-written ranges in the place of a tokenizer's."""

    def __init__(self, offsets: np.ndarray) -> None:
        self.offsets = offsets

    def token_to_chars(self, token: int) -> tuple[int, int]:
        return tuple(self.offsets[token])

    def char_to_token(self, character: int) -> int | None:
        return next((t for t, (start, end) in enumerate(self.offsets) if start <= character < end), None)


def touched(encoding: Any, spans: list[tuple[int, int]]) -> list[bool]:
    found = np.zeros(len(encoding.offsets), bool)
    for start, stop in _touched(encoding, spans, len(found), at=0):
        found[start:stop] = True
    return found.tolist()


def test_tokens_whose_ranges_were_trimmed_of_spaces() -> None:
    # "do:" + "    x" + end, as tokens "do", ":", "   " (trimmed to nothing), " x" (trimmed to x), end, "\n"
    offsets = np.array([[0, 2], [2, 3], [6, 6], [7, 8], [8, 11], [11, 12]])
    assert touched(Ranges(offsets), [(3, 11)]) == [False, False, True, True, True, False]
    # A piece of no width at a span's edge is not the model's.
    assert touched(Ranges(np.array([[0, 3], [3, 3], [3, 5]])), [(3, 5)]) == [False, False, True]


@pytest.mark.parametrize("trims", [False, True])
def test_spans_are_found_among_any_tokens(seed: int, trims: bool) -> None:
    draw = random.Random(seed)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trims)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = level
    backend.post_processor = processors.ByteLevel(trim_offsets=trims)
    words = ["the ", "  indented", "\n\n", "été ", "数学", "👩‍🔬", " x", "\t", "n" * 5, "\u3000"]
    texts = ["".join(draw.choices(words, k=draw.randint(0, 30))) for _ in range(300)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=level.alphabet(), special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    for text in texts:
        text = text.replace("nnnnn", "<|end|>")
        encoding = backend.encode(text)
        offsets = np.array(encoding.offsets).reshape(-1, 2)
        for _ in range(5):
            start, stop = sorted(draw.choices(range(len(text) + 1), k=2))
            assert touched(encoding, [(start, stop)]) == overlaps(offsets, [(start, stop)])
