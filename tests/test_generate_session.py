"""Conversations: whole characters only, one turn after another, and what an adapter brings back."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import swiftkit
from swiftkit.config import ChatConfig
from swiftkit.data.tokenizer import load_tokenizer, prompt_ids
from swiftkit.engine import Engine, LoraSpec
from swiftkit.engine.placement import place
from swiftkit.errors import UserError
from swiftkit.generate.chat import chat
from swiftkit.generate.decode import stream
from swiftkit.generate.find import find_checkpoint
from swiftkit.generate.sampling import Sampler
from swiftkit.generate.session import Session, answer_all
from swiftkit.train.run import Run
from tests import tiny
from tests.cases import toy

WORDS = ["Grüße, naïve café", "漢字とかな", "👩‍👩‍👧 and 🙂🙂", "plain", "ends in half: 🙂"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    tiny.make_toy(folder, template="chatml")
    return folder


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A short run with a system message and a template of its own."""
    return swiftkit.sft(
        model=model,
        dataset="swiftkit::persona",
        system="Be brief.",
        chat_template=toy.template("bos-headers"),
        max_steps=2,
        learning_rate=0.05,
        sample_prompts="none",
        output_dir=tmp_path_factory.mktemp("output"),
        console=Console(file=io.StringIO()),
    )


def open_session(**knobs: Any) -> Session:
    return Session.open(ChatConfig(**knobs), say=lambda _: None)


@pytest.mark.parametrize("text", WORDS)
@pytest.mark.parametrize("tok", ["plain", "merge"])
def test_streaming_shows_no_half_characters(model: Path, text: str, tok: str) -> None:
    session = open_session(model=str(model))
    session.tokenizer = toy.tokenizer(tok)
    ids = session.tokenizer(text, add_special_tokens=False)["input_ids"]
    kept: list[int] = []
    pieces = list(session._pieces(iter([[(0, token)] for token in ids]), kept))
    assert kept == ids
    assert "".join(pieces) == text
    assert all(piece and "\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert len(pieces) > 1
    # Cut in the middle of a character, the answer says so at its very end, and only there.
    cut = session.tokenizer("ab🙂", add_special_tokens=False)["input_ids"][:-1]
    *whole, last = session._pieces(iter([[(0, token)] for token in cut]), [])
    assert "".join(whole) == "ab" and set(last) == {"\N{REPLACEMENT CHARACTER}"}


def test_a_conversation_goes_on_over_turns(model: Path) -> None:
    session = open_session(model=str(model), max_new_tokens=6, system="Sing.")
    first = session.ask("One?")
    second = session.ask("Two?")
    turns = [
        {"role": "system", "content": "Sing."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Two?"},
    ]
    assert session.messages == [*turns, {"role": "assistant", "content": second}]
    alone = answer_all(
        session.engine, session.tokenizer, [turns[:2], turns], max_new_tokens=6, stops=session.stops
    )
    assert [first, second] == alone
    session.forget()
    assert session.messages == turns[:1]
    assert session.ask("One?") == first


def test_a_stopped_answer_stays_in_the_conversation(model: Path) -> None:
    session = open_session(model=str(model), max_new_tokens=50)
    answer = session.stream("Tell me")
    told = next(answer) + next(answer)
    answer.close()
    assert session.messages[0] == {"role": "user", "content": "Tell me"}
    assert session.messages[1]["content"].startswith(told)
    assert len(session.messages[1]["content"]) < 25


def test_the_context_is_not_outgrown(model: Path) -> None:
    session = open_session(model=str(model), max_new_tokens=50)
    session.stops = set()
    asked = prompt_ids(session.tokenizer, [{"role": "user", "content": "Hello"}])
    whole = len(list(stream_of(session, asked, 3)))
    session.engine.config.max_position_embeddings = len(asked) + 3
    assert whole == 3 and session._room_for_answer(len(asked)) == 3
    session.ask("Hello")
    with pytest.raises(UserError, match=rf"has \d+ tokens and the model reads {len(asked) + 3}"):
        session.ask("And then?")
    assert len(session.messages) == 2


def stream_of(session: Session, asked: list[int], new: int) -> Any:
    return stream(session.engine, [asked], max_new_tokens=new, stop_ids=(), sampler=Sampler())


def test_one_token_and_sampling_by_config(model: Path) -> None:
    one = open_session(model=str(model), max_new_tokens=1)
    assert one.ask("Hi") == open_session(model=str(model), max_new_tokens=1).ask("Hi")
    hot = dict(model=str(model), temperature=1.0, top_p=0.9, max_new_tokens=20)
    answers = [open_session(**hot, seed=seed).ask("Hi") for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_an_adapter_brings_back_what_it_was_trained_with(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # the model was named by its folder
    session = open_session(adapters=str(run.folder), max_new_tokens=8)
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    assert session.tokenizer.chat_template == Path(toy.template("bos-headers")).read_text(encoding="utf-8")
    base = open_session(model=str(model), max_new_tokens=8)
    base.tokenizer, base.messages = session.tokenizer, list(session.messages)
    assert session.ask("Who are you?") != base.ask("Who are you?")  # the adapter speaks
    assert open_session(adapters=str(run.adapter_dir), system="Other.").messages[0]["content"] == "Other."


def test_the_newest_checkpoint_is_taken(run: Run, tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", ".checkpoint-11.partial"):
        (tmp_path / name).mkdir()
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert find_checkpoint(run.adapter_dir) == run.adapter_dir
    with pytest.raises(UserError, match="no adapter and no checkpoint"):
        find_checkpoint(tmp_path / "nowhere")


def test_an_adapter_of_another_tool_needs_no_args(run: Run, model: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (foreign / name).write_bytes((run.adapter_dir / name).read_bytes())
    session = open_session(adapters=str(foreign), max_new_tokens=4)
    ours = open_session(adapters=str(run.adapter_dir), max_new_tokens=4)
    for name, tensor in ours.engine.parameters.items():
        assert torch.equal(tensor, session.engine.parameters[name])
    config = json.loads((foreign / "adapter_config.json").read_text(encoding="utf-8"))
    del config["base_model_name_or_path"]
    (foreign / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match="does not say which base"):
        open_session(adapters=str(foreign))
    assert open_session(adapters=str(foreign), model=str(model)).engine.parameters.keys()


def copied(run: Run, folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """The run's checkpoint with another `args.json`."""
    shutil.copytree(run.adapter_dir, folder)
    content = change(json.loads((folder / "args.json").read_text(encoding="utf-8")))
    (folder / "args.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def test_an_adapter_is_not_put_on_other_weights(run: Run, model: Path, tmp_path: Path) -> None:
    def of_others(args: dict[str, Any]) -> dict[str, Any]:
        return {**args, "base": {**args["base"], "fingerprint": "0" * 64}}

    adapters = copied(run, tmp_path / "checkpoint", of_others)
    now = run.args["base"]["fingerprint"][:12]
    with pytest.raises(UserError) as caught:
        open_session(adapters=adapters)
    words = (
        f"{adapters} was trained on {model} (from folder, fingerprint {'0' * 12}), "
        f"and {model} (from folder, fingerprint {now}) is not the same"
    )
    mend = f"give the --revision of then, or --model {model} to use it all the same"
    assert str(caught.value) == f"{words}; {mend}"
    said: list[str] = []
    Session.open(ChatConfig(adapters=adapters, model=str(model)), say=said.append)
    assert said == [f"{words}; answers may suffer"]


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, ("theirs/base", "pypi", "then")),
        ({"revision": "now", "model_source": "hf"}, ("theirs/base", "hf", "now")),
        ({"model": "mine/base"}, ("mine/base", "auto", None)),
        ({"model": "mine/base", "revision": "now"}, ("mine/base", "auto", "now")),
    ],
)
def test_the_base_comes_from_where_it_came_in_training(
    knobs: dict[str, Any],
    expected: tuple[str, str, str | None],
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def from_a_hub(args: dict[str, Any]) -> dict[str, Any]:
        config = {**args["config"], "model": "theirs/base", "revision": "then"}
        return {**args, "config": config, "base": {**args["base"], "source": "pypi"}}

    class Asked(Exception):
        pass

    def ask(name: str, *, source: str, revision: str | None, say: object) -> None:
        raise Asked(name, source, revision)

    monkeypatch.setattr("swiftkit.generate.load.open_model", ask)
    with pytest.raises(Asked) as asked:
        open_session(adapters=copied(run, tmp_path / "checkpoint", from_a_hub), **knobs)
    assert asked.value.args == expected


@pytest.mark.parametrize(
    ("asked", "flag", "expected"),
    [
        ("auto", "auto", "fp32"),  # auto on this machine, whatever it was on that of the training
        ("nf4", "auto", "nf4"),
        ("nf4", "bf16", "bf16"),
        (None, "auto", "fp8"),  # a run that does not say what was asked
    ],
)
def test_precision_is_what_was_asked_for(
    asked: str | None,
    flag: str,
    expected: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_hopper(args: dict[str, Any]) -> dict[str, Any]:
        args["config"]["base_precision"] = "fp8"
        args["asked"] = {**args["config"], "base_precision": asked}
        return {name: value for name, value in args.items() if asked or name != "asked"}

    class Placed(Exception):
        pass

    def spy(*arguments: Any, **keywords: Any) -> Any:
        raise Placed(place(*arguments, **keywords).base_precision)

    monkeypatch.setattr("swiftkit.generate.load.place", spy)
    adapters = copied(run, tmp_path / "checkpoint", of_hopper)
    with pytest.raises(Placed) as placed:
        open_session(adapters=adapters, base_precision=flag, device="cpu")
    assert placed.value.args == (expected,)


def test_an_adapter_of_ms_swift_is_one_of_another_tool(run: Run, tmp_path: Path) -> None:
    adapters = copied(run, tmp_path / "c", lambda _: {"model": "Qwen/None", "model_type": "qwen2", "seed": 1})
    session = open_session(adapters=adapters, max_new_tokens=2)  # on the base of PEFT's config
    assert session.messages == []
    session.ask("Hi")
    (tmp_path / "c" / "args.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"args\.json is not JSON"):
        open_session(adapters=adapters)


def test_dropout_is_of_training(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = copied(run, tmp_path / "c", lambda args: args)
    settings = tmp_path / "c" / "adapter_config.json"
    peft = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps({**peft, "lora_dropout": 0.1}), encoding="utf-8")
    given: list[LoraSpec] = []
    load = Engine.load

    def spy(*arguments: Any, **keywords: Any) -> Engine:
        given.append(keywords["lora"])
        return load(*arguments, **keywords)

    monkeypatch.setattr(Engine, "load", spy)
    open_session(adapters=adapters)
    assert given[0].dropout == 0.0 and given[0].rank == peft["r"]


def test_piped_questions_are_one_conversation(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("One?\n\nTwo?\n/new\nOne?"))
    chat(ChatConfig(model=str(model), max_new_tokens=6))
    session = open_session(model=str(model), max_new_tokens=6)
    one, two = session.ask("One?"), session.ask("Two?")
    heard = capsys.readouterr()
    assert heard.out == f"{one}\n{two}\n{one}\n"
    assert heard.err == ""
    chat(ChatConfig(model=str(model), max_new_tokens=6, prompt="One?"))
    assert capsys.readouterr().out == f"{one}\n"


def test_the_tokenizer_of_a_model_without_template(tmp_path: Path) -> None:
    tiny.make_toy(tmp_path)
    session = open_session(model=str(tmp_path), max_new_tokens=4)
    assert load_tokenizer(tmp_path).chat_template is None
    assert (
        prompt_ids(session.tokenizer, [{"role": "user", "content": "abc"}])
        == (session.tokenizer("abc")["input_ids"])
    )
    session.ask("abc")
