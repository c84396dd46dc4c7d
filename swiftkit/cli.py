"""The command line: a verb, then flags. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from swiftkit import __version__, flags, migrate, recipe_file, registry
from swiftkit.api import configure, configure_eval, configure_run, start_quantize, start_run
from swiftkit.config import (
    ChatConfig,
    Config,
    DownloadConfig,
    DpoConfig,
    EvalConfig,
    MergeConfig,
    PreviewConfig,
    QuantizeConfig,
    ReportConfig,
    RewardConfig,
    RunConfigT,
    SftConfig,
    StatsConfig,
)
from swiftkit.errors import UserError, nearest
from swiftkit.parallel.launch import WorkerError
from swiftkit.parallel.options import DoctorConfig, LaunchConfig
from swiftkit.parallel.worker import as_worker

Words = list[str]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 when it is done, 2 for the user's mistake, 1 for ours, 130 on Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with as_worker():
            _dispatch(words)
            sys.stdout.flush()
    except UserError as mistake:
        sys.exit(_complain(str(mistake)))
    except WorkerError as failure:
        _complain(f"{failure}\n{failure.trace}".rstrip())
        sys.exit(1)
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


def _train(schema: type[RunConfigT], verb: str, words: Words) -> None:
    if _asks_help(words):
        print(flags.describe(schema, verb))
        return
    file, knobs = flags.parse(schema, words)
    config = configure_run(schema, verb, knobs, file=file)
    if config.dry_run:
        from swiftkit.parallel.launch import describe_here

        print(describe_here(config.nproc_per_node, config.device, ["swiftkit", verb, *words]))
        return
    from rich.console import Console

    start_run(verb, config, Console())


def _chat(words: Words) -> None:
    if _asks_help(words):
        print(flags.describe(ChatConfig, "chat"))
        return
    file, knobs = flags.parse(ChatConfig, words)
    config = configure(ChatConfig, "chat", knobs, file=file)
    from swiftkit.generate.chat import chat

    chat(config)


def _eval(words: Words) -> None:
    if _asks_help(words):
        print(flags.describe(EvalConfig, "eval CHECKPOINT|FILE.yaml", file=False))
        return
    first, _ = _before_flags(words)
    if len(first) > 1:
        raise UserError(f"eval takes one checkpoint, or a file of flags, not {len(first)}: {' '.join(first)}")
    first = [word for word in first if not word.endswith(flags.FILES)]
    file, knobs = flags.parse(EvalConfig, words[len(first) :])
    if first and "checkpoint" in knobs:
        raise UserError("--checkpoint is given twice")
    config = configure_eval({**({"checkpoint": first[0]} if first else {}), **knobs}, file=file)
    from rich.console import Console

    from swiftkit.methods import evaluate

    evaluate.run(config, Console())


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


DATA_HELP = """swiftkit data preview FILE ... --model NAME [-n 5] [--row N] [--windows N] [--html OUT.html]
swiftkit data stats FILE ... --model NAME [--json OUT.json]

preview shows rows as the model sees them, with what is trained marked; stats counts lengths, duplicates, and
what a cut would lose. `swiftkit data preview --help` gives every flag."""


def _data(words: Words) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(DATA_HELP)
        if not words:
            raise UserError("data takes preview or stats, then a file")
        return
    kind, *rest = words
    if kind not in ("preview", "stats"):
        offer = nearest(kind, ("preview", "stats"), say="; did you mean {}?")
        raise UserError(f"data takes preview or stats, then a file, not {kind}{offer}")
    schema = PreviewConfig if kind == "preview" else StatsConfig
    if _asks_help(rest):
        print(flags.describe(schema, f"data {kind} FILE ...", file=False))
        return
    rest = _renamed(rest, {"-n": "--rows", "--json": "--json_file"})
    config = configure(schema, f"data {kind}", _with_first(schema, "dataset", rest))
    from rich.console import Console

    from swiftkit import look

    if isinstance(config, PreviewConfig):
        look.preview(config, Console())
    elif isinstance(config, StatsConfig):
        look.stats(config, Console())


def _report(words: Words) -> None:
    if _asks_help(words):
        print(flags.describe(ReportConfig, "report RUN ...", file=False))
        return
    config = configure(ReportConfig, "report", _with_first(ReportConfig, "runs", words))
    from swiftkit.export.report import report

    print(f"wrote {report(config.runs, output=config.output)}")


def _merge(words: Words) -> None:
    if _asks_help(words):
        print(flags.describe(MergeConfig, "merge CHECKPOINT OUT", file=False))
        return
    first, rest = _before_flags(words)
    if len(first) > 2:
        raise UserError(f"merge takes a checkpoint and a folder to make, not {len(first)} words")
    _, knobs = flags.parse(MergeConfig, rest, file=False)
    given = dict(zip(("adapters", "output_dir"), first, strict=False))
    config = configure(MergeConfig, "merge", {**given, **knobs})
    from swiftkit.export.merge import merge

    merge(config)


def _quantize(words: Words) -> None:
    if _asks_help(words):
        print(flags.describe(QuantizeConfig, "quantize MODEL|CHECKPOINT OUT|FILE.yaml", file=False))
        return
    first, rest = _before_flags(words)
    files = first if len(first) == 1 and first[0].endswith(flags.FILES) else []
    if len(first) > 2:
        raise UserError(f"quantize takes a model or checkpoint and a folder to make, not {len(first)} words")
    file, knobs = flags.parse(QuantizeConfig, [*files, *rest])
    given = {} if files else dict(zip(("checkpoint", "output_dir"), first, strict=False))
    start_quantize(configure(QuantizeConfig, "quantize", {**given, **knobs}, file=file))


def _doctor(words: Words) -> None:
    if _asks_help(words):
        print(flags.describe(DoctorConfig, "doctor", file=False))
        return
    _, knobs = flags.parse(DoctorConfig, _renamed(words, {"--json": "--as_json"}), file=False)
    config = configure(DoctorConfig, "doctor", knobs)
    from rich.console import Console

    from swiftkit.parallel import doctor

    if not doctor.run(config, Console()):
        sys.exit(1)


def _launch(words: Words) -> None:
    if _asks_help(words):
        print(flags.describe(LaunchConfig, "launch slurm|k8s|ssh FILE.yaml", file=False))
        return
    first, rest = _before_flags(words)
    _, knobs = flags.parse(LaunchConfig, rest, file=False)
    if len(first) + len({"scheduler", "file"} & set(knobs)) != 2:
        raise UserError("launch takes slurm, k8s or ssh, then a config file, as in: launch slurm my.yaml")
    config = configure(
        LaunchConfig, "launch", {**dict(zip(("scheduler", "file"), first, strict=False)), **knobs}
    )
    # A mistake in it is found here, not in the queue.
    configure(recipe_file.SCHEMAS[config.verb], config.verb, {}, file=config.file)
    from swiftkit.parallel.jobs import job_file

    print(job_file(config), end="")


def _renamed(words: Words, names: dict[str, str]) -> Words:
    """Flags by their full names, with the value that may hang on one by `=`."""
    parts = [word.partition("=") for word in words]
    return ["".join((names.get(name, name), *value)) for name, *value in parts]


def _with_first(schema: type[Config], name: str, words: Words) -> dict[str, Any]:
    """The knobs, of which one may stand in front without its flag."""
    first, rest = _before_flags(words)
    _, knobs = flags.parse(schema, rest, file=False)
    if first and name in knobs:
        raise UserError(f"{' '.join(first)} in front is --{name} already; give it once")
    return {name: first, **knobs} if first else knobs


def _before_flags(words: Words) -> tuple[Words, Words]:
    """The words that stand in front of the first flag, and the rest."""
    at = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    return words[:at], words[at:]


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
    "sft": Verb("fine-tune a model on your data", partial(_train, SftConfig, "sft")),
    "dpo": Verb(
        "learn from chosen and rejected answers: DPO and its kin, KTO", partial(_train, DpoConfig, "dpo")
    ),
    "reward": Verb("train a model that scores answers", partial(_train, RewardConfig, "reward")),
    "chat": Verb("talk to a model, or to a tuned one", _chat),
    "eval": Verb("loss, perplexity and exact match of a model, or of a tuned one", _eval),
    "data": Verb("look at rows as the model sees them, and count them", _data),
    "merge": Verb("base plus adapter as one model; to the hub, to GGUF", _merge),
    "quantize": Verb("a model in fewer bits, judged: GPTQ, AWQ, FP8, plain rounding", _quantize),
    "report": Verb("one page on one or several runs", _report),
    "download": Verb("fetch a model", _download),
    "doctor": Verb("is this machine ready? GPUs, links, disk, versions; --bench measures", _doctor),
    "launch": Verb("print a job file for several nodes: slurm, k8s or ssh", _launch),
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
