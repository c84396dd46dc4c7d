"""What every method has around the loop: the run folder, what is said first, checkpoints, samples, plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from swiftkit.config import SftConfig
from swiftkit.data import Message, Prepared
from swiftkit.data.tokenizer import generation_settings, stop_ids
from swiftkit.engine import Engine, LoraSpec
from swiftkit.engine.build import skeleton
from swiftkit.engine.exchange import select_targets
from swiftkit.engine.placement import Placement
from swiftkit.formats.named import locate
from swiftkit.formats.source import LocalModel
from swiftkit.generate.session import answer_all
from swiftkit.train.checkpoint import save_checkpoint
from swiftkit.train.log import Log
from swiftkit.train.plots import save_plots
from swiftkit.train.run import Run, create_folder, write_args, write_samples
from swiftkit.train.steps import StepPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LABEL = 10  # columns of what stands in front of a line for people


class Job:
    """One run, from the moment when everything about it is known and nothing heavy was loaded.

    Args:
        method: `sft`, ...
        asked: the config as it was given.
        config: with every `auto` resolved.
        model: the base on disk.
        tokenizer: with the template of this run.
        data, evaluation: packed windows.
        plan: steps and batch sizes.
        placement: device and precision.
        lora: shape of the adapter.
        adapter_size: its trained numbers.
        layers: fused or plain, for people.
        warnings: sentences for the header.
        console: where people look.
    """

    def __init__(
        self,
        *,
        method: str,
        asked: SftConfig,
        config: SftConfig,
        model: LocalModel,
        tokenizer: PreTrainedTokenizerFast,
        data: Prepared,
        evaluation: Prepared | None,
        plan: StepPlan,
        placement: Placement,
        lora: LoraSpec,
        adapter_size: int,
        layers: str,
        console: Console,
        warnings: Sequence[str] = (),
    ):
        self.asked, self.adapter_size, self.layers, self.warnings = asked, adapter_size, layers, warnings
        self.method, self.config, self.model, self.tokenizer = method, config, model, tokenizer
        self.data, self.evaluation, self.plan, self.placement = data, evaluation, plan, placement
        self.console = console
        self.lora = lora
        self.pad_id = int(tokenizer.pad_token_id or 0)  # of tokens that nothing looks at
        self._stops = stop_ids(tokenizer, model.path)
        self._generation = generation_settings(tokenizer, model.path)
        self._prompts = self._sample_prompts()
        self._before: list[str] = []

    def announce(self) -> None:
        """Make the run folder, and say what will happen: before anything heavy is loaded."""
        self.folder = create_folder(self.config.output_dir, self.config.model)
        self._record()
        self._say(*self._header())

    def begin(self, engine: Engine) -> Log:
        """Answer the sample prompts once, and open the log."""
        self._before = self._answers(engine)
        return Log(
            self.folder,
            steps=self.plan.steps,
            report_to=self.config.report_to,
            settings=self.config.model_dump(),
            console=self.console,
        )

    def save(self, engine: Engine, step: int) -> None:
        """Write a checkpoint after `step` steps, unless it stands there already."""
        if (self.folder / f"checkpoint-{step}").is_dir():
            return
        save_checkpoint(
            self.folder,
            step,
            engine=engine,
            spec=self.lora,
            tokenizer=self.tokenizer,
            base_model=base_for_others(self.config.model),
            generation=self._generation,
            keep=self.config.save_total_limit,
        )

    def end(self, engine: Engine) -> Run:
        """Answer the sample prompts again, draw the curves, and say where everything is."""
        run = Run(self.folder)
        save_plots(run.metrics, self.folder / "images")
        samples = [
            {"prompt": str(prompt[-1]["content"]), "before": before, "after": after}
            for prompt, before, after in zip(self._prompts, self._before, self._answers(engine), strict=True)
        ]
        write_samples(self.folder, samples)
        for sample in samples:
            self._say("", *(f"{label:<{LABEL}}{text}" for label, text in sample.items()))
        losses = run.metrics["loss"].dropna()
        self._say(
            "",
            f"trained   loss {losses.iloc[0]:.4f} at first, {losses.iloc[-1]:.4f} at last",
            f"run       {self.folder}",
        )
        # One line, however long: to be copied.
        self.console.print(
            f"talk      swiftkit chat --adapters {run.adapter_dir}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return run

    def _sample_prompts(self) -> list[list[Message]]:
        if self.config.sample_prompts == "auto":
            return self.data.prompts
        system = [] if self.config.system is None else [{"role": "system", "content": self.config.system}]
        return [[*system, {"role": "user", "content": prompt}] for prompt in self.config.sample_prompts]

    def _answers(self, engine: Engine) -> list[str]:
        if not self._prompts:
            return []
        terminal = self.console.is_terminal
        with self.console.status("answering the sample prompts") if terminal else nullcontext():
            return answer_all(
                engine,
                self.tokenizer,
                self._prompts,
                max_new_tokens=self.config.sample_max_new_tokens,
                stops=self._stops,
            )

    def _record(self) -> None:
        """Write what the run is made of, before it starts."""
        facts: dict[str, dict[str, Any]] = {
            "asked": self.asked.model_dump(),
            "base": {
                "source": self.model.source,
                "revision": self.model.revision,
                "fingerprint": self.model.fingerprint,
                "note": self.model.note,
            },
            "data": {"training": self.data.fingerprint},
            "plan": asdict(self.plan),
            "machine": {"device": self.placement.device_name},
        }
        report = {"training": self.data.report.to_dict()}
        if self.evaluation is not None:
            facts["data"]["evaluation"] = self.evaluation.fingerprint
            report["evaluation"] = self.evaluation.report.to_dict()
        write_args(self.folder, method=self.method, config=self.config.model_dump(), facts=facts)
        text = json.dumps(report, indent=2, ensure_ascii=False)
        (self.folder / "data_report.json").write_text(text + "\n", encoding="utf-8")

    def _header(self) -> list[str]:
        plan, report, lora = self.plan, self.data.report, self.lora
        precision = self.placement.base_precision
        numerics = (
            " (8-bit products: results differ a little from bf16)" if "fp8" in self.placement.base else ""
        )
        lines = [
            f"model     {self.config.model} from {self.model.source}, {self.model.fingerprint[:12]}",
            f"          {self.model.note}",
            f"base      {precision} on {self.placement.device_name}{numerics}, {self.layers} layers",
            f"adapter   LoRA rank {lora.rank}, alpha {lora.alpha:g}, {self.adapter_size:,} parameters",
            *report.lines(),
            f"evaluated {self.evaluation.report.rows_kept:,} rows" if self.evaluation else "",
            f"steps     {plan.steps:,} of {plan.global_batch_size} windows "
            f"({plan.gradient_accumulation_steps} x {plan.micro_batch_size}), "
            f"learning rate {self.config.learning_rate:g}, {self.config.lr_scheduler_type}",
            f"          {plan.note}",
            *(f"warning   {warning}" for warning in self.warnings),
            f"run       {self.folder}",
        ]
        return [line for line in lines if line.strip()]

    def _say(self, *lines: str) -> None:
        """Print lines whose first columns are a label; where a screen is too narrow, the rest is indented."""
        console = self.console
        if console.is_terminal or console.is_jupyter:
            lines = tuple(_wrapped(line, console) for line in lines)
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _wrapped(line: str, console: Console) -> str:
    """The line broken between words."""
    parts = Text(line[LABEL:]).wrap(console, max(console.width - LABEL, 20), no_wrap=False)
    return line[:LABEL] + f"\n{' ' * LABEL}".join(part.plain.rstrip() for part in parts)


def adapter_size(description: Any, lora: LoraSpec) -> int:
    """How many numbers an adapter trains, counted before there are weights.

    Args:
        description: the model's transformers config.
        lora: the adapter's shape.
    """
    model = skeleton(description)
    layers: list[Any] = [model.get_submodule(name) for name in select_targets(model, lora.target_modules)]
    return lora.rank * sum(layer.in_features + layer.out_features for layer in layers)


def base_for_others(model: str) -> str:
    """What PEFT's config calls the base: a hub id or an absolute folder; others know no names of ours."""
    where = locate(model)
    return where.hf or str((where.folder or Path(model)).resolve())
