"""`swiftkit quantize`: a model, or base plus adapter, in fewer bits, judged, for every reader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swiftkit.config import MergeConfig, QuantizeConfig, build
from swiftkit.data.tokenizer import load_tokenizer
from swiftkit.engine.build import describe, skeleton
from swiftkit.engine.placement import find_device
from swiftkit.errors import UserError
from swiftkit.export import files
from swiftkit.export.adapter import open_adapter
from swiftkit.export.merge import parse_size
from swiftkit.export.weights import MergedWeights
from swiftkit.formats.named import open_model
from swiftkit.formats.older import with_older_rope
from swiftkit.formats.packing import packing_of
from swiftkit.formats.peft import LoraSpec
from swiftkit.formats.shards import Stored, StoredWeights, shards, write_shards
from swiftkit.formats.source import fingerprint
from swiftkit.generate.find import find
from swiftkit.hub import Say
from swiftkit.parallel.world import World, joined
from swiftkit.quantize.layout import Layout, choose
from swiftkit.quantize.report import FILE, Report
from swiftkit.quantize.run import preset, quantize_layers
from swiftkit.quantize.shapes import cards_for, check_shapes, linears_of
from swiftkit.quantize.stream import StreamedModel
from swiftkit.quantize.texts import Texts, prepare_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORK = "layers"  # of the folder in the making: what is quantized so far


class Weights:
    """A model's tensors, the head apart from the embedding where that is asked for.

    Args:
        merged: of a base, or of base plus adapter.
        untie: store a tied head by itself.
    """

    def __init__(self, merged: MergedWeights, *, untie: bool):
        self._merged = merged
        self._copied: dict[str, Stored] = {}
        self.tensors = list(merged.tensors)
        self.tied = merged.tied and not untie
        self.vocabulary = merged.vocabulary
        if merged.tied and untie:
            embedding = next(tensor for tensor in self.tensors if tensor.name == merged.ends.embedding)
            self.tensors.append(Stored(merged.ends.head, embedding.dtype, embedding.shape))
            self._copied[merged.ends.head] = embedding

    def pieces(self, tensor: Stored) -> Iterator[Tensor]:
        """A tensor's rows in order, in its type."""
        return self._merged.pieces(self._copied.get(tensor.name, tensor))


class Model:
    """What is quantized, opened: weights, description, tokenizer, and where files beside the weights lie.

    Raises:
        UserError: it is not there, or cannot be read.
    """

    def __init__(self, config: QuantizeConfig, device: torch.device, say: Say):
        where = find(checkpoint=config.checkpoint)
        if where.adapter is None:
            base = open_model(str(where.model), source=config.model_source, revision=config.revision, say=say)
            self.base, self.own, spec, tensors = base.path, base.path, LoraSpec(), {}
            self.name = base.name
        else:
            asked = ("model", "model_source", "revision", "output_dir")
            knobs = {name: getattr(config, name) for name in asked}
            adapter = open_adapter(build(MergeConfig, {"adapters": str(where.adapter), **knobs}), say)
            self.base, self.own = adapter.base.path, adapter.folder
            spec, tensors = adapter.spec, adapter.tensors
            self.name = f"{adapter.folder} merged into {adapter.base.name}"
        self.description = describe(self.base)
        packing = packing_of(self.description)
        if packing is not None:
            raise UserError(
                f"{self.name}: the base is quantized already ({packing}), and rounding it once more would "
                "only lose; quantize the model that it was made from, or merge the adapter (swiftkit merge) "
                "and quantize that"
            )
        own = (self.own / "tokenizer.json").is_file()
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(
            self.own if own else self.base, config.chat_template
        )
        merged = MergedWeights(
            StoredWeights(self.base), description=self.description, spec=spec, tensors=tensors, device=device
        )
        self.weights = Weights(merged, untie=config.untie_head)
        self.head = merged.ends.head.removesuffix(".weight")

    def shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each linear layer that is quantized."""
        model = skeleton(self.description)
        layers: Any = model.base_model.layers  # type: ignore[union-attr]
        names = {module: name for name, module in model.named_modules()}
        return {
            f"{names[layer]}.{name}": (linear.out_features, linear.in_features)
            for layer in layers
            for name, linear in linears_of(layer).items()
        }


def quantize(config: QuantizeConfig, *, say: Say = print) -> Path:
    """Write the quantized model to `config.output_dir`, with a report on what it cost.

    Everything is written beside, judged, and renamed: a folder of that name is whole. Of several processes
    each takes a share of the work, and the first one writes and speaks.

    Raises:
        UserError: for what is wrong with model, texts, shapes or target, before anything is computed; or when
            the perplexity rises by more than `max_ppl_increase`, and then the report is kept beside.
    """
    with joined(find_device(config.device)) as world:
        return _quantize(config, say if world.first else _silent, world)


def _silent(_: str) -> None:
    """Another rank speaks."""


def _quantize(config: QuantizeConfig, say: Say, world: World) -> Path:
    out = Path(config.output_dir).expanduser()
    if out.exists():
        raise UserError(f"{out} exists already; give another folder, or remove it first")
    device = world.device or torch.device(find_device(config.device))
    shard_bytes = parse_size(config.max_shard_size)
    model = world.once_a_node(partial(Model, config, device, say))
    shapes = model.shapes()
    layout = _layout(config, model, next(iter(shapes)))
    check_shapes(shapes, layout)
    texts = world.once_a_node(partial(_texts, config, model))
    world.check_same(f"{fingerprint(model.base)} {texts.fingerprint}", "model files or rows")
    report = Report(preset(layout, model=model.name, seed=config.seed, dataset=config.dataset))
    _head(model, shapes, layout, texts, report, say)
    if world.size > 1:
        say(f"processes {world.size}, each with a share of the texts and of every layer's matrices")
    beside = out.absolute().with_name(f".{out.name}.partial")
    try:
        if world.first:
            shutil.rmtree(beside, ignore_errors=True)  # left by a run that was killed
            (beside / WORK).mkdir(parents=True)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        stream = StreamedModel(model.weights, description=model.description, device=device, dtype=dtype)
        quantize_layers(stream, texts, layout, folder=beside / WORK, report=report, say=say, world=world)
        del stream

        def finish() -> None:
            _write(beside, model, layout, list(shapes), report, shard_bytes, say)
            for line in report.lines():
                say(line)
            _judge(report, config, out)
            files.flush(beside)
            beside.rename(out)
            files.flush_folder(out.absolute().parent)

        world.from_first(finish)
    finally:
        if world.first:
            shutil.rmtree(beside, ignore_errors=True)
    say(f"wrote     {out} ({FILE} has every number)")
    return out


def _layout(config: QuantizeConfig, model: Model, linear: str) -> Layout:
    stored = next(t.dtype for t in model.weights.tensors if t.name == f"{linear}.weight")
    return choose(
        method=config.method,
        form=config.format,
        bits=config.bits,
        group_size=config.group_size,
        symmetric=config.sym,
        damping=config.damp_percent,
        act_order=config.act_order,
        dtype=stored,
    )


def _texts(config: QuantizeConfig, model: Model) -> Texts:
    longest = getattr(model.description, "max_position_embeddings", None) or config.max_length
    return prepare_texts(
        dataset=config.dataset,
        val_dataset=config.val_dataset,
        tokenizer=model.tokenizer,
        vocabulary=model.weights.vocabulary,
        max_length=min(config.max_length, longest),
        calibration_windows=config.calibration_windows,
        eval_windows=config.eval_windows,
        calibrates=config.method in ("gptq", "awq"),
        seed=config.seed,
        settings={"columns": config.columns, "system": config.system},
    )


def _head(
    model: Model,
    shapes: dict[str, tuple[int, int]],
    layout: Layout,
    texts: Texts,
    report: Report,
    say: Say,
) -> None:
    """What is about to be done, and what is known to be thin."""
    scheme = layout.scheme
    grid = "FP8" if scheme is None else (
        f"{scheme.bits} bits, group {scheme.group_size}, {'symmetric' if scheme.symmetric else 'asymmetric'}"
    )  # fmt: skip
    say(f"quantize  {model.name}: {len(shapes)} layers by {layout.method}, {grid}, format {layout.form}")
    report.calibration = {
        "windows": len(texts.calibration),
        "tokens": texts.tokens,
        "judged_windows": len(texts.judged),
        "judged_tokens": sum(batch.tokens for batch in texts.judged),
    }
    say(
        f"texts     {texts.tokens:,} tokens calibrate, {report.calibration['judged_tokens']:,} are judged"
        + ("" if texts.held_out else " (the same: one window cannot be divided)")
    )
    widest = max(shapes, key=lambda name: shapes[name][1])
    if texts.calibration and texts.tokens < shapes[widest][1]:
        report.notes.append(
            f"the calibration has {texts.tokens:,} tokens, fewer than the {shapes[widest][1]:,} inputs of "
            f"{widest}: it says nothing of some directions, which are then only damped; give more rows"
        )
        say(f"warning   {report.notes[-1]}")
    group = 1 if scheme is None else scheme.group_size
    heads = int(model.description.num_attention_heads)
    cards = cards_for(shapes, group_size=group, heads=heads)
    report.settings["tensor_parallel"] = cards
    say(f"splits    over {', '.join(map(str, cards)) or 'no number of'} GPUs, for tensor-parallel serving")


def _write(
    folder: Path,
    model: Model,
    layout: Layout,
    linears: list[str],
    report: Report,
    shard_bytes: int,
    say: Say,
) -> None:
    """Config, tokenizer, weights and report."""
    weights = model.weights
    files.write_config(folder, model.base, tied=weights.tied, vocabulary=weights.vocabulary, dtype=None)
    path = folder / files.CONFIG
    content = with_older_rope(json.loads(path.read_text(encoding="utf-8")))
    content["quantization_config"] = layout.quantization_config([model.head])
    files.write_json(path, content)
    beside = layout.quantize_config()
    if beside is not None:
        files.write_json(folder / "quantize_config.json", beside)
    files.copy_tokenizer(folder, own=model.own, base=model.base)
    files.write_generation(folder, model.tokenizer, own=model.own, base=model.base)
    done = StoredWeights(folder / WORK)
    packed = {f"{name}.weight" for name in linears}
    plain = [t for t in weights.tensors if t.name not in packed and t.name not in done.tensors]
    tensors = [*plain, *done.tensors.values()]

    def pieces(tensor: Stored) -> Iterator[Tensor]:
        if tensor.name not in done.tensors:
            yield from weights.pieces(tensor)
            return
        for rows in tensor.ranges():
            yield done.rows(tensor.name, *rows)

    write_shards(folder, shards(tensors, max_bytes=shard_bytes), pieces)
    shutil.rmtree(folder / WORK)
    report.size = {
        "before": sum(tensor.nbytes for tensor in weights.tensors),
        "after": sum(tensor.nbytes for tensor in tensors),
    }
    for note in report.notes:
        say(f"note      {note}")
    files.write_json(folder / FILE, report.as_json())


def _judge(report: Report, config: QuantizeConfig, out: Path) -> None:
    """Refuse a model that lost too much; its report stays, beside where it would have been."""
    limit = config.max_ppl_increase
    if report.increase <= limit:
        return
    kept = out.absolute().with_name(f"{out.name}.{FILE}")
    files.write_json(kept, report.as_json())
    worst = max(report.linears, key=lambda one: one.error)
    raise UserError(
        f"the perplexity rises by {report.increase:.1%}, more than --max_ppl_increase {limit:g} allows; the "
        f"worst layer is {worst.name} (error {worst.error:.1%}). No model was kept, the report is {kept}. "
        "Try more calibration rows, a smaller --group_size, or more --bits"
    )
