"""The model card of a merged model: base, data, method, licence; as the hub shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit import __version__
from swiftkit.config import MergeConfig
from swiftkit.errors import UserError
from swiftkit.export.adapter import Adapter
from swiftkit.formats.named import known_recipe, locate
from swiftkit.registry import Recipe

if TYPE_CHECKING:
    from swiftkit.export.verify import Checked

CARD = "README.md"
# Licences that the hub's card has a word for; another goes as `other`, with its name.
HUB_LICENCES = {
    "Apache-2.0": "apache-2.0", "MIT": "mit", "gemma": "gemma", "llama3": "llama3", "llama3.1": "llama3.1",
    "llama3.2": "llama3.2", "llama3.3": "llama3.3",
}  # fmt: skip


def write(folder: Path, adapter: Adapter, config: MergeConfig, checked: Checked) -> None:
    """Write README.md. No path of this machine is in it."""
    base, recipe = _base(adapter)
    parts = [
        _front(base, recipe),
        f"# {Path(config.output_dir).expanduser().absolute().name}",
        f"{_link(base)}, fine-tuned with swiftkit {__version__} and merged with its "
        f"adapter ({config.merge_base} weights of the base).",
        "## Data",
        _data(adapter),
        "## Training",
        _training(adapter),
        "## The merge",
        _merge(checked),
        "## Licence",
        _licence(base, recipe),
    ]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _base(adapter: Adapter) -> tuple[str, Recipe | None]:
    """What the base is called on the hub (a folder: its last part), and its recipe where it has one."""
    name = str(adapter.args.get("config", {}).get("model") or adapter.base.name)
    try:
        recipe, where = known_recipe(name), locate(name)
    except UserError:  # a folder of another machine
        return Path(name).name, None
    return where.hf or Path(name).name, recipe


def _link(base: str) -> str:
    return f"[{base}](https://huggingface.co/{base})" if "/" in base else base


def _front(base: str, recipe: Recipe | None) -> str:
    lines = [f"base_model: {base}"] if "/" in base else []
    licence = recipe.licence if recipe else None
    if licence in HUB_LICENCES:
        lines.append(f"license: {HUB_LICENCES[str(licence)]}")
    elif licence:
        lines += ["license: other", f"license_name: {licence}"]
    lines += ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- swiftkit"]
    return "\n".join(["---", *lines, "---"])


def _data(adapter: Adapter) -> str:
    config: dict[str, Any] = adapter.args.get("config", {})
    report = adapter.folder.parent / "data_report.json"
    sources = [_source(written) for written in config.get("dataset", ())]
    if not sources:
        return "Not recorded: the adapter is not of a swiftkit run."
    told = f"Trained on {', '.join(sources)}"
    if report.is_file():
        counts = json.loads(report.read_text(encoding="utf-8")).get("training", {})
        numbers = {"rows_kept": "rows", "trained_tokens": "trained tokens"}
        known = [
            f"{counts[key]:,} {word}" for key, word in numbers.items() if isinstance(counts.get(key), int)
        ]
        told += f": {', '.join(known)}" if known else ""
    return told + "."


def _source(written: str) -> str:
    """A data set's name: of a file only the last part, and how many rows of it were taken."""
    return written if re.match(r"(hf|ms|swiftkit)::", written) else Path(written).name


def _training(adapter: Adapter) -> str:
    config, spec = adapter.args.get("config", {}), adapter.spec
    kind = " with DoRA" if spec.dora else ", rank-stabilised" if spec.rslora else ""
    leaves = sorted({name.rpartition(".")[2] for name in spec.target_modules})
    facts = [
        f"- LoRA{kind}, rank {spec.rank}, alpha {spec.alpha:g}, on {', '.join(leaves)}",
        f"- trained whole: {', '.join(spec.modules_to_save)}" if spec.modules_to_save else "",
        f"- method: {adapter.args['method']}" if "method" in adapter.args else "",
        f"- base precision in training: {config['base_precision']}" if "base_precision" in config else "",
        f"- peak learning rate {config['learning_rate']:g}, {config['lr_scheduler_type']}"
        if "learning_rate" in config
        else "",
    ]
    return "\n".join(fact for fact in facts if fact)


def _merge(checked: Checked) -> str:
    layers = checked.layers
    facts = [
        f"- largest error of a layer's output: {layers.error:.1e} (bound {layers.bound:.1e})",
        f"- share of the adapter's change in the written weights: {layers.kept:.1%}",
        "" if checked.logits is None else f"- relative difference of the logits: {checked.logits:.1e}",
        *(f"- loss on a few rows, {name}: {loss:.4f}" for name, loss in checked.losses),
    ]
    return "\n".join(fact for fact in facts if fact)


def _licence(base: str, recipe: Recipe | None) -> str:
    known = f" ({recipe.licence})" if recipe and recipe.licence else ""
    return (
        f"The licence of the base model, {base}{known}, holds for this model too; the data may add terms of "
        "its own. Check both before you publish or use it."
    )
