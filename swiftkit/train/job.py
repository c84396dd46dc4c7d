"""What every method has around the loop: the run folder, what is said first, checkpoints, samples, plots."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from swiftkit.config import SftConfig
from swiftkit.data import Message, Prepared
from swiftkit.data.tokenizer import stop_ids
from swiftkit.engine import Engine, LoraSpec
from swiftkit.engine.placement import Placement
from swiftkit.formats.source import LocalModel
from swiftkit.generate.session import answer_all
from swiftkit.train.checkpoint import save_checkpoint
from swiftkit.train.log import Log
from swiftkit.train.plots import save_plots
from swiftkit.train.run import Run, create_folder, write_args, write_samples
from swiftkit.train.steps import StepPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Job:
    """One run, from the moment when everything about it is known and nothing heavy was loaded.

    Args:
        method: `sft`, ...
        config: with every `auto` resolved.
        model: the base on disk.
        tokenizer: with the template of this run.
        data, evaluation: packed windows.
        plan: steps and batch sizes.
        placement: device and precision.
        console: where people look.
    """

    def __init__(
        self,
        *,
        method: str,
        config: SftConfig,
        model: LocalModel,
        tokenizer: PreTrainedTokenizerFast,
        data: Prepared,
        evaluation: Prepared | None,
        plan: StepPlan,
        placement: Placement,
        console: Console,
    ):
        self.method, self.config, self.model, self.tokenizer = method, config, model, tokenizer
        self.data, self.evaluation, self.plan, self.placement = data, evaluation, plan, placement
        self.console = console
        self.lora = LoraSpec(
            config.lora_rank, config.lora_alpha, config.lora_dropout, tuple(config.target_modules)
        )
        self.pad_id = int(tokenizer.pad_token_id or 0)  # of tokens that nothing looks at
        self.folder = create_folder(config.output_dir, config.model)
        self._stops = stop_ids(tokenizer, model.path)
        self._prompts = self._sample_prompts()
        self._before: list[str] = []
        self._record()

    def begin(self, engine: Engine) -> Log:
        """Say what will happen, answer the sample prompts once, and open the log."""
        self._header(engine)
        self._before = self._answers(engine)
        return Log(
            self.folder,
            steps=self.plan.steps,
            report_to=self.config.report_to,
            settings=self.config.model_dump(),
            console=self.console,
        )

    def save(self, engine: Engine, step: int) -> None:
        """Write a checkpoint after `step` steps."""
        save_checkpoint(
            self.folder,
            step,
            engine=engine,
            spec=self.lora,
            tokenizer=self.tokenizer,
            base_model=self.config.model,
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
            self._say(f"\nprompt  {sample['prompt']}\nbefore  {sample['before']}\nafter   {sample['after']}")
        self._say(f"\nrun     {self.folder}\ntalk    swiftkit chat --adapters {run.adapter_dir}")
        return run

    def _sample_prompts(self) -> list[list[Message]]:
        if self.config.sample_prompts == "auto":
            return self.data.prompts
        system = [] if self.config.system is None else [{"role": "system", "content": self.config.system}]
        return [[*system, {"role": "user", "content": prompt}] for prompt in self.config.sample_prompts]

    def _answers(self, engine: Engine) -> list[str]:
        if not self._prompts:
            return []
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
            "base": {
                "source": self.model.source,
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

    def _header(self, engine: Engine) -> None:
        trained = sum(parameter.numel() for parameter in engine.parameters.values())
        plan = self.plan
        self._say(f"model     {self.config.model} from {self.model.source}, {self.model.fingerprint[:12]}")
        if self.model.note:
            self._say(f"          {self.model.note}")
        self._say(f"base      {self.placement.base_precision} on {self.placement.device_name}")
        self._say(f"adapter   LoRA rank {self.lora.rank}, alpha {self.lora.alpha:g}, {trained:,} parameters")
        for line in self.data.report.lines():
            self._say(line)
        if self.evaluation is not None:
            self._say(f"evaluated {self.evaluation.report.rows_kept:,} rows")
        self._say(
            f"steps     {plan.steps:,} of {plan.global_batch_size} windows "
            f"({plan.gradient_accumulation_steps} x {plan.micro_batch_size}), "
            f"learning rate {self.config.learning_rate:g}, {self.config.lr_scheduler_type}"
        )
        if plan.note:
            self._say(f"          {plan.note}")
        self._say(f"run       {self.folder}")

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
