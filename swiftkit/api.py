"""The Python door: the same configs and the same calls as the command line.

run = swiftkit.sft(model="smollm2-135m", dataset="my.jsonl")
run.metrics, run.plot(), run.chat().ask("Who are you?"), run.adapter_dir
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit import registry
from swiftkit.config import ConfigT, SftConfig, build, canonical
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
    resolved = configure(SftConfig, method="sft", knobs=knobs, file=config)
    from rich.console import Console

    from swiftkit.methods import sft as method

    return method.run(resolved, console or Console())


def configure(
    schema: type[ConfigT], *, method: str, knobs: Mapping[str, Any], file: str | Path | None = None
) -> ConfigT:
    """Flags over file over recipe over the schema's defaults.

    The flags and the file are checked alone first: a recipe of a model that the registry does not know comes
    from its config.json, which may have to be downloaded.
    """
    written = {} if file is None else read_config(Path(file), method=method)
    known = build(schema, knobs, written)
    name: str = known.model  # type: ignore[attr-defined]
    if not Path(name).is_dir():
        recipe = registry.resolve(name)
    if Path(name).is_dir() or recipe is None:
        from swiftkit.formats.named import recipe_of

        recipe = recipe_of(name, source=known.model_source, revision=known.revision)  # type: ignore[attr-defined]
    return build(schema, knobs, written, registry.defaults(recipe, method))


def read_config(path: Path, *, method: str) -> dict[str, Any]:
    """The knobs in a YAML file, or in the `args.json` of a run.

    Raises:
        UserError: for a missing or malformed file, or a run of another method.
    """
    import yaml

    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as failure:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(failure).split())}") from None
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: a config is a mapping of names to values, as `swiftkit cp MODEL {method} FILE` writes"
        )
    if "config" in content and "method" in content:
        if content["method"] != method:
            raise UserError(f"{path} is of a {content['method']} run; use swiftkit {content['method']}")
        content = content["config"]
    return {canonical(str(key)): value for key, value in content.items()}
