"""What every method has around the loop: the run folder, what is said first, checkpoints, samples, plots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from swiftkit.config import PreferenceConfig, RunConfig, SampleKnobs
from swiftkit.data import Message, Trainable
from swiftkit.data.tokenizer import generation_settings, stop_ids
from swiftkit.engine import Engine
from swiftkit.engine.placement import Placement
from swiftkit.formats.generation import mended
from swiftkit.formats.named import locate
from swiftkit.formats.source import LocalModel
from swiftkit.generate.session import answer_all
from swiftkit.parallel.world import ALONE, World
from swiftkit.train.checkpoint import checkpoint_files, clear_partial, read_snapshot
from swiftkit.train.keeper import Keeper
from swiftkit.train.log import Log, SilentLog
from swiftkit.train.plots import save_plots
from swiftkit.train.resume import Resume, find, identity
from swiftkit.train.run import Run, create_folder, owned, write_args, write_samples
from swiftkit.train.steps import StepPlan
from swiftkit.train.tuning import Tuning

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
        tuning: what is trained.
        layers: fused or plain, for people.
        warnings: sentences for the header.
        notes: lines of the header that only this method has.
        world: the processes of the run; the first one writes and speaks.
        console: where people look.
    """

    def __init__(
        self,
        *,
        method: str,
        asked: RunConfig,
        config: RunConfig,
        model: LocalModel,
        tokenizer: PreTrainedTokenizerFast,
        data: Trainable,
        evaluation: Trainable | None,
        plan: StepPlan,
        placement: Placement,
        tuning: Tuning[Any],
        layers: str,
        console: Console,
        warnings: Sequence[str] = (),
        notes: Sequence[str] = (),
        world: World = ALONE,
    ):
        self.world = world
        self.asked, self.tuning, self.layers, self.warnings = asked, tuning, layers, warnings
        self._notes = notes
        self.method, self.config, self.model, self.tokenizer = method, config, model, tokenizer
        self.data, self.evaluation, self.plan, self.placement = data, evaluation, plan, placement
        self.console = console
        self.pad_id = int(tokenizer.pad_token_id or 0)  # of tokens that nothing looks at
        self._stops = stop_ids(tokenizer, model.path)
        self._generation, odd = mended(generation_settings(tokenizer, model.path))
        if odd:
            self.warnings = [*warnings, _left_out(odd)]
        self._prompts = self._sample_prompts()
        self._longest_sample = config.sample_max_new_tokens if isinstance(config, SampleKnobs) else 0
        self._before: list[str] = []
        self._resume: Resume | None = None
        self._identity = identity(
            config,
            base=model.fingerprint,
            data=data.fingerprint,
            windows=data.num_windows,
            evaluation=None if evaluation is None else evaluation.fingerprint,
            steps=plan.steps,
        )

    @property
    def _unit(self) -> str:
        """What the batch sizes count, for people."""
        return "rows" if isinstance(self.config, PreferenceConfig) else "windows"

    @contextmanager
    def announce(self) -> Iterator[None]:
        """Take the run folder, a new one or a resumed run's, and say what will happen: before weights load.

        Raises:
            UserError: when there is nothing to resume from, or another process is training in that folder.
        """
        self.folder, self._resume = self.world.from_first(self._find_folder)
        with owned(self.folder) if self.world.first else nullcontext():
            if self.world.first:
                clear_partial(self.folder)
                self._record()
                self._say(*self._header())
            self.world.wait()
            yield

    def _find_folder(self) -> tuple[Path, Resume | None]:
        resume = find(
            self.config.resume_from_checkpoint,
            self._identity,
            output_dir=self.config.output_dir,
            say=self._say,
        )
        if resume is None:
            return create_folder(self.config.output_dir, self.config.model), None
        return resume.folder, resume

    def begin(self, engine: Engine) -> Log:
        """Answer the sample prompts once, and open the log."""
        self._before = self._answers(engine)
        if not self.world.first:
            return SilentLog(self.world.rank)
        return Log(
            self.folder,
            steps=self.plan.steps,
            report_to=self.config.report_to,
            settings=self.config.model_dump(),
            console=self.console,
            resumed=None if self._resume is None else self._resume.facts["log"],
        )

    def keeper(self, engine: Engine) -> Keeper:
        """Keeps the run's checkpoints, and has the one that it goes on from."""
        return Keeper(
            self.folder,
            artifact=self.tuning.artifact(engine, base_for_others(self.config.model)),
            files=checkpoint_files(self.tokenizer, self._generation),
            facts=self._identity,
            keep=self.config.save_total_limit,
            on_error=self.config.on_save_error,
            resumed=None if self._resume is None else read_snapshot(self._resume.checkpoint),
            say=self._say,
            writes=self.world.first,
            group=self.world.writers if engine.parts else None,
        )

    def end(self, engine: Engine) -> Run:
        """Answer the sample prompts again, draw the curves, and say where everything is."""
        run = Run(self.folder)
        answers = self._answers(engine)
        if not self.world.first:
            return run
        save_plots(run.metrics, self.folder / "images")
        samples = [
            {"prompt": str(prompt[-1]["content"]), "before": before, "after": after}
            for prompt, before, after in zip(self._prompts, self._before, answers, strict=True)
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
        if isinstance(self.config, SampleKnobs):
            # One line, however long: to be copied.
            self.console.print(
                f"talk      swiftkit chat --{'adapters' if self.tuning.lora else 'model'} {run.adapter_dir}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        return run

    def _sample_prompts(self) -> list[list[Message]]:
        if not isinstance(self.config, SampleKnobs):  # what is trained answers nothing
            return []
        if self.config.sample_prompts == "auto":
            return self.data.prompts
        system = [] if self.config.system is None else [{"role": "system", "content": self.config.system}]
        return [[*system, {"role": "user", "content": prompt}] for prompt in self.config.sample_prompts]

    def _answers(self, engine: Engine) -> list[str]:
        """The first rank's, which takes all that hold a part of its model."""
        if not self._prompts or self.world.copy > 0:
            return []
        terminal = self.console.is_terminal
        with self.console.status("answering the sample prompts") if terminal else nullcontext():
            return answer_all(
                engine,
                self.tokenizer,
                self._prompts,
                max_new_tokens=self._longest_sample,
                stops=self._stops,
            )

    def _record(self) -> None:
        """Write what the run is made of, before it starts."""
        facts: dict[str, Any] = {
            "asked": self.asked.model_dump(),
            "base": {
                "source": self.model.source,
                "revision": self.model.revision,
                "fingerprint": self.model.fingerprint,
                "note": self.model.note,
            },
            "data": {"training": self.data.fingerprint},
            "plan": asdict(self.plan),
            "machine": {
                "device": self.placement.device_name,
                "processes": self.world.size,
                "layout": self.world.layout.name,
            },
        }
        if self._resume is not None:
            facts["resumed"] = [*Run(self.folder).args.get("resumed", []), self._resume.step]
        report = {"training": self.data.report.to_dict()}
        if self.evaluation is not None:
            facts["data"]["evaluation"] = self.evaluation.fingerprint
            report["evaluation"] = self.evaluation.report.to_dict()
        config = self.config.with_changes(resume_from_checkpoint=None)  # to repeat the run from its beginning
        write_args(self.folder, method=self.method, config=config.model_dump(), facts=facts)
        text = json.dumps(report, indent=2, ensure_ascii=False)
        (self.folder / "data_report.json").write_text(text + "\n", encoding="utf-8")

    def _header(self) -> list[str]:
        plan, report = self.plan, self.data.report
        precision = self.placement.precision
        numerics = (
            " (8-bit products: results differ a little from bf16)" if "fp8" in self.placement.base else ""
        )
        lines = [
            f"model     {self.config.model} from {self.model.source}, {self.model.fingerprint[:12]}",
            f"          {self.model.note}",
            f"base      {precision} on {self.placement.device_name}{numerics}, {self.layers} layers",
            *self.tuning.lines(),
            *self._notes,
            *report.lines(),
            f"evaluated {self.evaluation.report.rows_kept:,} rows" if self.evaluation else "",
            f"steps     {plan.steps:,} of {plan.global_batch_size} {self._unit} "
            f"({plan.gradient_accumulation_steps} x {plan.micro_batch_size}), "
            f"learning rate {self.config.learning_rate:g}, {self.config.lr_scheduler_type}",
            f"          {plan.note}",
            *self._world_lines(),
            *(f"warning   {warning}" for warning in self.warnings),
            *self._resumed_lines(),
            f"run       {self.folder}",
        ]
        return [line for line in lines if line.strip()]

    def _world_lines(self) -> list[str]:
        world = self.world
        if world.size == 1:
            return []
        nodes = f" on {world.nodes} nodes" if world.nodes > 1 else ""
        kind = "GPU" if self.placement.device.type == "cuda" else "CPU"
        most = math.ceil(self.plan.global_batch_size / world.data_size)
        together = world.layout.tp * world.layout.shard
        held = "each with the whole base" if together == 1 else f"each {together} with a model between them"
        lead = f"processes {world.size}{nodes} ({world.layout.name}), one a {kind}"
        return [f"{lead}, {held} and up to {most} {self._unit} of a step"]

    def _resumed_lines(self) -> list[str]:
        if self._resume is None:
            return []
        step = self._resume.step
        left = f"{self.plan.steps - step:,} left" if step < self.plan.steps else "nothing is left to train"
        return [
            f"resume    from step {step:,}, {left}; it goes on in its own run folder",
            "          lines of its log behind that step are cut off",
        ]

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


def _left_out(settings: Sequence[str]) -> str:
    return (
        f"the base's generation_config.json contradicts itself; checkpoints leave out {', '.join(settings)}, "
        "which mean nothing there"
    )


def base_for_others(model: str) -> str:
    """What PEFT's config calls the base: a hub id or an absolute folder; others know no names of ours."""
    where = locate(model)
    return where.hf or str((where.folder or Path(model)).resolve())
