"""The command line: a verb, then flags. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from swiftkit import __version__, flags, migrate, recipe_file, registry
from swiftkit.api import configure, configure_sft
from swiftkit.config import ChatConfig, DownloadConfig, SftConfig
from swiftkit.errors import UserError, nearest

Words = list[str]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 when it is done, 2 for the user's mistake, 1 for ours, 130 on Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _dispatch(words)
        sys.stdout.flush()
    except UserError as mistake:
        sys.exit(_complain(str(mistake)))
    except KeyboardInterrupt:
        print("\nswiftkit: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `swiftkit ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(0)
    sys.exit(0)


def _complain(message: str) -> int:
    print(f"swiftkit: {message}", file=sys.stderr)
    return 2


def _dispatch(words: Words) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return
    if words[0] in ("-V", "--version"):
        print(f"swiftkit {__version__}")
        return
    name, *rest = words
    if name not in VERBS:
        entry = migrate.lookup(name, "verb")
        offer = nearest(name, VERBS, say="; did you mean {}?")
        raise UserError(entry.sentence() if entry else f"no such command: {name}{offer} (swiftkit --help)")
    VERBS[name].run(rest)


def _sft(words: Words) -> None:
    if _asks_help(words):
        print(flags.describe(SftConfig, "sft"))
        return
    file, knobs = flags.parse(SftConfig, words)
    config = configure_sft(knobs, file=file)
    from rich.console import Console

    from swiftkit.methods import sft

    sft.run(config, Console())


def _chat(words: Words) -> None:
    if _asks_help(words):
        print(flags.describe(ChatConfig, "chat"))
        return
    file, knobs = flags.parse(ChatConfig, words)
    config = configure(ChatConfig, "chat", knobs, file=file)
    from swiftkit.generate.chat import chat

    chat(config)


def _download(words: Words) -> None:
    if _asks_help(words):
        print(flags.describe(DownloadConfig, "download NAME", file=False))
        return
    name = [] if not words or words[0].startswith("--") else [words.pop(0)]
    _, knobs = flags.parse(DownloadConfig, words, file=False)
    config = configure(DownloadConfig, "download", {**({"model": name[0]} if name else {}), **knobs})
    from swiftkit.formats.named import open_model

    model = open_model(config.model, source=config.source, revision=config.revision, to_train=False)
    print(f"{model.name} from {model.source}, fingerprint {model.fingerprint[:12]}")
    if model.note:
        print(model.note)
    print(model.path)


def _ls(words: Words) -> None:
    if _asks_help(words):
        print("swiftkit ls [WORD ...]\n\nThe models whose name, ids or licence have every word.")
        return
    found = registry.search(words)
    if not found:
        raise UserError(f"no model has {' and '.join(words)} in its name; `swiftkit ls` shows all")
    width = shutil.get_terminal_size((120, 24)).columns
    print(recipe_file.listing(found, piped=not sys.stdout.isatty(), width=width))


def _show(words: Words) -> None:
    if _asks_help(words) or not 1 <= len(words) <= 2:
        print(f"swiftkit show NAME [{'|'.join(registry.METHODS)}]\n\nA model, and what it is trained with.")
        if not _asks_help(words):
            raise UserError("show takes a name, and maybe a method")
        return
    print(recipe_file.show(_recipe(words[0]), words[1] if len(words) == 2 else None))


def _cp(words: Words) -> None:
    if _asks_help(words) or len(words) != 3:
        print(f"swiftkit cp NAME {'|'.join(registry.METHODS)} FILE.yaml\n\nA commented recipe to edit.")
        if not _asks_help(words):
            raise UserError("cp takes a name, a method and a file")
        return
    name, method, file = words
    text = recipe_file.render(_recipe(name), method, path=file)
    path = Path(file)
    if path.exists():
        raise UserError(f"{path} exists already; give another name, or remove it first")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is no folder")
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}; run it with: swiftkit {registry.METHODS[method].verb} {path}")


def _recipe(name: str) -> registry.Recipe:
    from swiftkit.formats.named import recipe_of

    return recipe_of(name)


def _help(words: Words) -> None:
    if not words:
        print(_overview())
    elif words == ["migrate"]:
        print(migrate.table(shutil.get_terminal_size((100, 24)).columns))
    elif len(words) == 1 and words[0] in VERBS and words[0] != "help":
        VERBS[words[0]].run(["--help"])
    else:
        offer = nearest(words[0], [*VERBS, "migrate"], say="; did you mean {}?")
        raise UserError(f"no help on {' '.join(words)}{offer}")


def _asks_help(words: Words) -> bool:
    return "--help" in words or "-h" in words


@dataclass(frozen=True)
class Verb:
    """One command."""

    help: str
    run: Callable[[Words], None]


VERBS: dict[str, Verb] = {
    "sft": Verb("fine-tune a model on your data", _sft),
    "chat": Verb("talk to a model, or to a tuned one", _chat),
    "download": Verb("fetch a model", _download),
    "ls": Verb("models that have a recipe", _ls),
    "show": Verb("a model's recipe", _show),
    "cp": Verb("write a recipe as YAML, to edit", _cp),
    "help": Verb("help on a command; `help migrate` for users of ms-swift", _help),
}


def _overview() -> str:
    verbs = "\n".join(f"  {name:<10}{verb.help}" for name, verb in VERBS.items())
    return (
        f"swiftkit {__version__} fine-tunes open language models.\n\n{verbs}\n\n"
        "swiftkit COMMAND --help gives every flag, with default and unit. To begin:\n"
        "  swiftkit sft --model smollm2-135m --dataset swiftkit::persona"
    )
