"""The tokenizer of a model folder, the ids of a prompt, and the tokens at which an answer ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit.data.conversation import SYSTEM_ROLES, Conversation, Message
from swiftkit.data.document import Origin
from swiftkit.data.template import ChatTemplate, resolve_chat_template
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(folder: Path, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a model folder.

    Args:
        folder: holds tokenizer.json.
        chat_template: a built-in name or a Jinja file, in place of the folder's own template.

    Raises:
        UserError: without a fast tokenizer, or without that template.
    """
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json: training needs a fast tokenizer, for its offsets")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if chat_template is not None:
        tokenizer.chat_template = resolve_chat_template(chat_template)
    fast: PreTrainedTokenizerFast = tokenizer
    return fast


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    """Token ids of a conversation that waits for the assistant's answer.

    System words go where training puts them (see ChatTemplate.fitted). Without a chat template the messages
    are plain text, one after another, as completions are trained.

    Raises:
        UserError: the template has no place for a message.
    """
    if tokenizer.chat_template is None:
        text = "\n".join(str(message["content"]) for message in messages)
        return list(tokenizer(text)["input_ids"])
    if any(message["role"] in SYSTEM_ROLES for message in messages):
        asked = Conversation(messages=messages, origin=Origin("the conversation", 1))
        messages = ChatTemplate(tokenizer).fitted(asked)[0].messages
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def stop_ids(tokenizer: PreTrainedTokenizerFast, folder: Path) -> set[int]:
    """Tokens that end an answer: the model's own, the tokenizer's, and what the template puts there."""
    found: set[int | None] = {tokenizer.eos_token_id}
    settings = folder / "generation_config.json"
    if settings.is_file():
        eos = json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id")
        found.update(eos if isinstance(eos, list) else [eos])
    if tokenizer.chat_template is not None:
        found.add(_end_of_turn(tokenizer))
    return {token for token in found if token is not None}


def generation_settings(tokenizer: PreTrainedTokenizerFast, folder: Path) -> dict[str, Any]:
    """What a generation_config.json beside a tuned model holds, so that other tools stop where it learnt to.

    Args:
        tokenizer: with the template of the training.
        folder: the base model's; its own settings stay.
    """
    settings = folder / "generation_config.json"
    own = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    # The tokenizer's own stop token first: some tools read only one.
    stops = sorted(stop_ids(tokenizer, folder), key=lambda token: (token != tokenizer.eos_token_id, token))
    known = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    known = {key: value for key, value in known.items() if value is not None}
    return {**known, **own, "eos_token_id": stops}


def _end_of_turn(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The first special token that the template writes behind an answer."""
    probe = "wxyz"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": probe}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    behind = tokenizer(text[text.rindex(probe) + len(probe) :], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return next((token for token in behind if token in special), None)
