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

from swiftkit import flags, registry
from swiftkit.config import Config, ConfigT, SftConfig, build
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

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
    """
    resolved = configure_sft(knobs, file=config)
    with warnings.catch_warnings():  # tqdm, which libraries import, misses a widget that no run needs
        warnings.filterwarnings("ignore", message="IProgress not found")
        import_module("tqdm.auto")
    from rich.console import Console

    from swiftkit.methods import sft as method

    return method.run(resolved, console or Console())


def configure_sft(knobs: Mapping[str, Any], *, file: str | Path | None = None) -> SftConfig:
    """Flags over file over recipe over the schema's defaults, and what the machine says to them.

    All that needs no model is checked first: the model may have to be downloaded, if only for the config.json
    that is the recipe of a name which the registry does not know.
    """
    from swiftkit.formats.named import known_recipe, recipe_of

    known = configure(SftConfig, "sft", knobs, file=file)
    recipe = known_recipe(known.model)
    _preflight(known)
    if recipe is None:
        recipe = recipe_of(known.model, source=known.model_source, revision=known.revision)
    return configure(SftConfig, "sft", knobs, file=file, recipe=registry.defaults(recipe, "sft"))


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


def _preflight(config: SftConfig) -> None:
    """What can be known before a model is downloaded.

    Raises:
        UserError: for a data set, a template, an output folder or a package that is not there.
    """
    from swiftkit.data import read
    from swiftkit.data.template import resolve_chat_template
    from swiftkit.train.log import check_writers
    from swiftkit.train.run import check_output_dir

    on_bad = (lambda _: None) if config.skip_bad_rows else None  # they are counted when all rows are read
    for source in (*config.dataset, *config.val_dataset):
        next(read(source, on_bad=on_bad, streaming=config.streaming), None)
    resolve_chat_template(config.chat_template)
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
