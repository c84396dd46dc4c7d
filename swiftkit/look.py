"""What `swiftkit data` does: open a tokenizer, look at rows with it, and show what was found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console

from swiftkit.config import PreviewConfig, StatsConfig
from swiftkit.data.page import check_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def preview(config: PreviewConfig, console: Console) -> None:
    """Rows or windows in the terminal, or as a page.

    Raises:
        UserError: for a model, a source or a target that is not there.
    """
    from swiftkit.data.preview import ROWS
    from swiftkit.data.preview import preview as look
    from swiftkit.data.preview_page import preview_page
    from swiftkit.data.preview_text import show

    target = None if config.html is None else check_target("html", config.html, ".html")
    tokenizer, longest = _opened(config)
    rows = (ROWS if config.row is None else 1) if config.rows == "auto" else config.rows
    found = look(
        config.dataset,
        tokenizer=tokenizer,
        longest=longest,
        rows=rows,
        row=config.row,
        windows=config.windows,
        packing=config.packing,
        **_knobs(config),
    )
    if target is None:
        show(found, console)
    else:
        target.write_text(preview_page(found, model=config.model), encoding="utf-8")
        console.print(f"wrote {target}", highlight=False, markup=False, soft_wrap=True)


def stats(config: StatsConfig, console: Console) -> None:
    """Counts in the terminal, and as JSON.

    Raises:
        UserError: for a model, a source or a target that is not there.
    """
    from swiftkit.data.stats import count
    from swiftkit.data.stats_text import lines

    target = None if config.json_file is None else check_target("json", config.json_file, ".json")
    tokenizer, longest = _opened(config)
    with console.status("reading") as status:
        found = count(
            config.dataset,
            tokenizer=tokenizer,
            longest=longest,
            packing=config.packing,
            tell=lambda rows: status.update(f"{rows:,} rows"),
            **_knobs(config),
        )
    console.print("\n".join(lines(found)), highlight=False, markup=False, soft_wrap=True)
    if target is not None:
        text = json.dumps(found.to_dict(), indent=2, ensure_ascii=False)
        target.write_text(text + "\n", encoding="utf-8")


def _knobs(config: PreviewConfig | StatsConfig) -> dict[str, Any]:
    """The knobs that decide what a model sees of a row."""
    names = (
        "max_length",
        "truncation_strategy",
        "system",
        "columns",
        "train_on",
        "thinking_history",
        "streaming",
    )
    return {name: getattr(config, name) for name in names}


def _opened(config: PreviewConfig | StatsConfig) -> tuple[PreTrainedTokenizerFast, int | None]:
    """The tokenizer, and the longest window that the model can be trained on (None where nobody knows)."""
    from swiftkit.data.template import resolve_chat_template
    from swiftkit.data.tokenizer import load_tokenizer
    from swiftkit.formats.tokenizer_only import tokenizer_folder

    resolve_chat_template(config.chat_template)
    folder = tokenizer_folder(config.model, source=config.model_source, revision=config.revision)
    tokenizer = load_tokenizer(folder, config.chat_template)
    if not (folder / "config.json").is_file():
        return tokenizer, None
    from transformers import AutoConfig

    from swiftkit.methods.opening import longest_window

    return tokenizer, longest_window(AutoConfig.from_pretrained(folder), config.max_length)
