"""The Python door: the same configs and the same calls as the command line.

run = swiftkit.sft(model="smollm2-135m", dataset="my.jsonl")
run.metrics, run.plot(), run.chat().ask("Who are you?"), run.adapter_dir
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit import flags, registry, support
from swiftkit.config import (
    Config,
    ConfigT,
    DpoConfig,
    EvalConfig,
    MergeConfig,
    QuantizeConfig,
    ReadyModelKnobs,
    ReportConfig,
    RewardConfig,
    RunConfig,
    RunConfigT,
    SftConfig,
    build,
)
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from swiftkit.methods.evaluate import Evaluation
    from swiftkit.methods.scoring import RewardModel
    from swiftkit.train.run import Run


def sft(config: str | Path | None = None, /, *, console: Console | None = None, **knobs: Any) -> Run:
    """Supervised fine-tuning; what `swiftkit sft` does.

    Args:
        config: a YAML file, or a run's `args.json` to do it again.
        console: where progress goes; a rich console of the terminal or the notebook when left out.
        knobs: the flags of `swiftkit sft --help`; they win over the file.

    Returns:
        A view of the run's folder: `.metrics`, `.plot()`, `.samples`, `.chat()`, `.adapter_dir`.

    Raises:
        UserError: naming what is wrong, before anything is trained.
        WorkerError: naming rank, file and line, where one of several processes failed.
    """
    return _train(SftConfig, "sft", knobs, config, console)


def _train(
    schema: type[RunConfigT],
    verb: str,
    knobs: Mapping[str, Any],
    file: str | Path | None,
    console: Console | None,
) -> Run:
    resolved = configure_run(schema, verb, knobs, file=file)
    if resolved.dry_run:
        raise UserError(f"dry_run is for the command line: swiftkit {verb} ... --dry_run")
    _quiet_tqdm()
    from rich.console import Console

    return start_run(verb, resolved, console or Console())


def start_run(verb: str, config: RunConfig, console: Console) -> Run:
    """Train here, or in several processes where there are several GPUs or NPROC_PER_NODE says so.

    Args:
        verb: the method: sft, dpo, reward.
        config: checked.
        console: where people look.
    """
    from swiftkit.parallel.launch import plan_here, start
    from swiftkit.parallel.worker import write_result
    from swiftkit.train.run import Run

    launch = plan_here(config.nproc_per_node, config.device)
    if launch is not None and launch.several:
        asked = {"method": verb, "config": config.model_dump(mode="json", exclude_unset=True)}
        return Run(start(launch, verb, json.dumps(asked)))
    run: Run = import_module(f"swiftkit.methods.{verb}").run(config, console)
    write_result(run.folder)
    return run


def dpo(config: str | Path | None = None, /, *, console: Console | None = None, **knobs: Any) -> Run:
    """Learn from chosen and rejected answers, or from labelled ones; what `swiftkit dpo` does.

    Args, returned value and errors are those of `sft`; the knobs are the flags of `swiftkit dpo --help`.
    """
    return _train(DpoConfig, "dpo", knobs, config, console)


def reward(config: str | Path | None = None, /, *, console: Console | None = None, **knobs: Any) -> Run:
    """Train a model that scores answers; what `swiftkit reward` does.

    Args, returned value and errors are those of `sft`; the knobs are the flags of `swiftkit reward --help`.
    """
    return _train(RewardConfig, "reward", knobs, config, console)


def reward_model(checkpoint: str | Path, /, **knobs: Any) -> RewardModel:
    """Load what `swiftkit reward` trained: `.score(conversations)` gives a number for each.

    Args:
        checkpoint: a checkpoint or a run's folder.
        knobs: `model`, `model_source`, `revision`, `base_precision`, `device`, `chat_template`.

    Raises:
        UserError: there is no reward model.
    """
    from swiftkit.methods.scoring import RewardModel

    return RewardModel.load(configure(ReadyModelKnobs, "reward", {"adapters": checkpoint, **knobs}))


def _quiet_tqdm() -> None:
    """Import tqdm, which libraries use, without its word on a widget that no run needs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        import_module("tqdm.auto")


def evaluate(
    checkpoint: str | Path | None = None, /, *, console: Console | None = None, **knobs: Any
) -> Evaluation:
    """Loss, perplexity and exact match; what `swiftkit eval` does.

    Args:
        checkpoint: a checkpoint, a run's folder, a model's folder or name; or say `model` and `adapters`.
        console: where the result is printed; a rich console of the terminal or the notebook when left out.
        knobs: the flags of `swiftkit eval --help`.

    Returns:
        `.metrics`, a dictionary of numbers, and `.predictions`, a list with an entry for each question.

    Raises:
        UserError: naming what is wrong, before weights are loaded.
    """
    resolved = configure_eval(knobs if checkpoint is None else {"checkpoint": checkpoint, **knobs})
    from rich.console import Console

    from swiftkit.methods import evaluate as method

    return method.run(resolved, console or Console())


def merge(adapters: str | Path, output_dir: str | Path, /, **knobs: Any) -> Path:
    """Base plus adapter as one model, checked; what `swiftkit merge` does.

    Args:
        adapters: a checkpoint or a run's folder.
        output_dir: the folder to make.
        knobs: the flags of `swiftkit merge --help`.

    Returns:
        The folder.

    Raises:
        UserError: naming what is wrong, or by how much the merged model differs from its adapter.
    """
    config = configure(MergeConfig, "merge", {"adapters": adapters, "output_dir": output_dir, **knobs})
    from swiftkit.export.merge import merge as run

    return run(config)


def quantize_model(checkpoint: str | Path, output_dir: str | Path, /, **knobs: Any) -> Path:
    """A model in fewer bits, judged; what `swiftkit quantize` does.

    Args:
        checkpoint: a model's name or folder, or a checkpoint or run with an adapter.
        output_dir: the folder to make.
        knobs: the flags of `swiftkit quantize --help`.

    Returns:
        The folder; its quantize_report.json has every number.

    Raises:
        UserError: naming what is wrong, or by how much the perplexity rose.
    """
    given = {"checkpoint": checkpoint, "output_dir": output_dir}
    return start_quantize(configure(QuantizeConfig, "quantize", {**given, **knobs}))


def start_quantize(config: QuantizeConfig) -> Path:
    """Quantize here, or in several processes where there are several GPUs or NPROC_PER_NODE says so."""
    from swiftkit.parallel.launch import plan_here, start
    from swiftkit.parallel.worker import write_result

    launch = plan_here(config.nproc_per_node, config.device)
    if launch is not None and launch.several:
        asked = {"method": "quantize", "config": config.model_dump(mode="json", exclude_unset=True)}
        return start(launch, "quantize", json.dumps(asked))
    from swiftkit.export.quantize import quantize as run

    folder = run(config)
    write_result(folder)
    return folder


def report(*runs: str | Path, output: str | Path = "report.html") -> Path:
    """One page on one or several runs; what `swiftkit report` does.

    Args:
        runs: their folders.
        output: the page's file.

    Returns:
        The page's file.

    Raises:
        UserError: a folder is no run.
    """
    config = configure(ReportConfig, "report", {"runs": list(runs), "output": output})
    from swiftkit.export.report import report as write

    return write(config.runs, output=config.output)


# What a run's args.json says of its rows, and its evaluation takes over where no flag says otherwise.
AS_TRAINED = ("columns", "system", "thinking_history", "train_on")


def configure_eval(knobs: Mapping[str, Any], *, file: str | Path | None = None) -> EvalConfig:
    """Flags over file over what the checkpoint was trained with over the schema's defaults.

    All that needs no model is checked first.
    """
    from swiftkit.data import read
    from swiftkit.data.template import resolve_chat_template
    from swiftkit.generate.find import find

    known = configure(EvalConfig, "eval", knobs, file=file)
    on_bad = (lambda _: None) if known.skip_bad_rows else None
    for source in known.dataset:
        next(read(source, on_bad=on_bad, streaming=known.streaming), None)
    resolve_chat_template(known.chat_template)
    trained = find(checkpoint=known.checkpoint, adapters=known.adapters, model=known.model).trained
    remembered = {name: trained[name] for name in AS_TRAINED if name in trained}
    return configure(EvalConfig, "eval", knobs, file=file, recipe=remembered)


def configure_sft(knobs: Mapping[str, Any], *, file: str | Path | None = None) -> SftConfig:
    """As `configure_run`, of `swiftkit sft`."""
    return configure_run(SftConfig, "sft", knobs, file=file)


def configure_run(
    schema: type[RunConfigT], verb: str, knobs: Mapping[str, Any], *, file: str | Path | None = None
) -> RunConfigT:
    """Flags over file over recipe over the schema's defaults, and what the machine says to them.

    All that needs no model is checked first: the model may have to be downloaded, if only for the config.json
    that is the recipe of a name which the registry does not know.
    """
    from swiftkit.formats.named import known_recipe, recipe_of

    known = configure(schema, verb, knobs, file=file)
    recipe = known_recipe(known.model)
    _preflight(known)
    if recipe is None:
        recipe = recipe_of(known.model, source=known.model_source, revision=known.revision)
    defaults = dict(registry.defaults(recipe, verb))
    if known.tuner_type == "full":
        defaults.pop("learning_rate", None)  # a recipe's is for an adapter
    return configure(schema, verb, knobs, file=file, recipe=defaults)


def configure(
    schema: type[ConfigT],
    verb: str,
    knobs: Mapping[str, Any],
    *,
    file: str | Path | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> ConfigT:
    """Flags over file over recipe over the schema's defaults.

    Raises:
        UserError: naming every unknown key and every bad value, with file and line where it stands in one.
    """
    flagged = _translated(schema, {name: (value, "") for name, value in knobs.items()})
    filed = {} if file is None else _translated(schema, read_config(Path(file), verb=verb))
    places = {name: place for name, (_, place) in filed.items() if name not in flagged}
    layers = [{name: value for name, (value, _) in entries.items()} for entries in (flagged, filed)]
    return build(schema, *layers, recipe or {}, places=places)


def _translated(schema: type[Config], entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Under our names; unknown ones stay, so that the schema refuses them all together."""
    found: dict[str, Entry] = {}
    for written, (value, place) in entries.items():
        try:
            name, renamed = flags.knob_of(schema, written)
        except UserError as refusal:
            raise UserError(f"{place}: {refusal}" if place else str(refusal)) from None
        if name in found:
            raise UserError(f"{place}: --{name} is given twice" if place else f"--{name} is given twice")
        found[name] = _plain(value, renamed), place
    return found


def _plain(value: Any, renamed: Mapping[str, str]) -> Any:
    """Paths as text, and values by the names that they have here."""
    if isinstance(value, list | tuple):
        return [_plain(part, renamed) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool):
        return renamed.get(str(value).lower(), value)
    return renamed.get(str(value), value) if isinstance(value, str | int) else value


def _preflight(config: RunConfig) -> None:
    """What can be known before a model is downloaded.

    Raises:
        UserError: for a data set, a template, an output folder or a package that is not there, and for what
            cannot be combined.
    """
    from swiftkit.data import read
    from swiftkit.data.template import resolve_chat_template
    from swiftkit.train.log import check_writers
    from swiftkit.train.run import check_output_dir

    on_bad = (lambda _: None) if config.skip_bad_rows else None  # they are counted when all rows are read
    for source in (*config.dataset, *config.val_dataset):
        next(read(source, on_bad=on_bad, streaming=config.streaming), None)
    resolve_chat_template(config.chat_template)
    support.check(support.asked(config), config.base_precision)
    support.check_optimizer(config.optim)
    check_writers(config.report_to)
    check_output_dir(config.output_dir)


# ---- a config file ------------------------------------------------------------------------------------

Entry = tuple[Any, str]  # a value, and where it was written (`my.yaml:3`, or nowhere)


def read_config(path: Path, *, verb: str) -> dict[str, Entry]:
    """The entries of a YAML file, or of the `args.json` of a run, by the names that are written there.

    Raises:
        UserError: for a missing, malformed or empty file, a name that stands twice, a run of another verb.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as failure:
        raise UserError(f"{path} cannot be read as UTF-8 text: {failure}") from None
    if not text.strip():
        raise UserError(f"{path} is empty; `swiftkit cp MODEL {verb} FILE` writes a complete config")
    content, places = _json(path, text) if path.suffix == ".json" else _yaml(path, text)
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: a config is a mapping of names to values, as `swiftkit cp MODEL {verb} FILE` writes"
        )
    if "config" in content and "method" in content:
        if content["method"] != verb:
            raise UserError(f"{path} is of a {content['method']} run; use swiftkit {content['method']}")
        content = content["config"]
    return {str(name): (value, places.get(str(name), str(path))) for name, value in content.items()}


def _json(path: Path, text: str) -> tuple[Any, dict[str, str]]:
    try:
        return json.loads(text), {}
    except json.JSONDecodeError as failure:
        raise UserError(f"{path}:{failure.lineno}: not valid JSON: {failure.msg}") from None


def _yaml(path: Path, text: str) -> tuple[Any, dict[str, str]]:
    """The content, and the line of each name."""
    import yaml

    try:
        content, root = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as failure:
        mark, rule = failure.problem_mark, failure.problem or "cannot be read"
        place = path if mark is None else f"{path}:{mark.line + 1}"
        mend = "; use spaces, not tabs" if "\\t" in rule else ""
        raise UserError(f"{place}: not valid YAML: {rule}{mend}") from None
    except yaml.YAMLError as failure:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(failure).split())}") from None
    places: dict[str, str] = {}
    for key, _ in root.value if isinstance(root, yaml.MappingNode) else ():
        place = f"{path}:{key.start_mark.line + 1}"
        if key.value in places:
            raise UserError(f"{place}: {key.value} stands twice, first at {places[key.value]}")
        places[key.value] = place
    return content, places
