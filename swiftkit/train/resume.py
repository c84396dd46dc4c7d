"""Which checkpoint a run goes on from, and whether it is one of this very run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftkit.config import Config, SftConfig
from swiftkit.errors import UserError
from swiftkit.formats.checkpoints import checkpoints
from swiftkit.train.checkpoint import damage, number_of, read_facts
from swiftkit.train.run import runs_of

Say = Callable[[str], None]
Facts = dict[str, Any]

OTHERS_NAMED = 3  # runs that `auto` says it passed over, the newest first

# Knobs that may differ, as they change no number that is trained: where and how often things are written, how
# a step is cut, what follows a fault.
FREE = frozenset({
    "dataset_num_proc", "device", "dry_run", "early_stopping_patience", "eval_steps",
    "gradient_accumulation_steps", "hang_timeout", "layout", "load_best_model_at_end", "load_from_cache_file",
    "logging_steps", "metric_for_best_model", "model_source", "nproc_per_node", "on_bad_loss",
    "on_save_error", "output_dir", "per_device_train_batch_size", "report_to",
    "resume_from_checkpoint", "sample_max_new_tokens", "sample_prompts", "save_steps", "save_total_limit",
    "tensor_parallel_size",
})  # fmt: skip
# What these lead to has a fingerprint, which decides; they are named where that differs.
OF_MODEL = frozenset({"model", "revision"})
OF_DATA = frozenset({
    "chat_template", "columns", "dataset", "interleave_prob", "max_dropped", "skip_bad_rows",
    "split_dataset_ratio", "stopping_strategy", "streaming", "system", "thinking_history", "train_on",
    "truncation_strategy", "val_dataset",
})  # fmt: skip


@dataclass(frozen=True)
class Resume:
    """A sound checkpoint of this very run.

    Args:
        checkpoint: its folder.
        facts: the content of its `training_state.json`.
    """

    checkpoint: Path
    facts: Facts

    @property
    def folder(self) -> Path:
        """The run folder, in which the run goes on."""
        return self.checkpoint.parent

    @property
    def step(self) -> int:
        """Finished steps."""
        return int(self.facts["step"])


def identity(
    config: Config, *, base: str, data: str, windows: int, evaluation: str | None, steps: int
) -> Facts:
    """What makes two runs the same, as it is written into each checkpoint.

    Args:
        config: resolved.
        base, data, evaluation: fingerprints.
        windows: of the data.
        steps: of the whole run.
    """
    return {
        "config": config.model_dump(mode="json"),
        "base": base,
        "data": data,
        "windows": windows,
        "evaluation": evaluation,
        "steps": steps,
    }


def find(asked: str | None, mine: Facts, *, output_dir: str, say: Say) -> Resume | None:
    """The checkpoint to go on from.

    Args:
        asked: `auto`, a checkpoint or a run folder; None is a fresh start.
        mine: `identity` of the run that is about to begin.
        output_dir: where `auto` looks.
        say: takes what was passed over and why.

    Raises:
        UserError: for a path that is no sound checkpoint, is one of another run, or has later ones beside it.
    """
    if asked is None:
        return None
    if asked == "auto":
        return _newest(mine, output_dir, say)
    path = Path(asked).expanduser().resolve()
    checkpoint = path if path.name.startswith("checkpoint-") and path.is_dir() else _sound(path, say)
    if checkpoint is None:
        raise UserError(
            f"--resume_from_checkpoint {asked} is no checkpoint, and no run folder with a sound one"
        )
    broken = damage(checkpoint)
    if broken is not None:
        raise UserError(f"--resume_from_checkpoint: {broken}; take another checkpoint, or auto")
    found = Resume(checkpoint, read_facts(checkpoint))
    odd = differences(found.facts, mine)
    if odd:
        raise UserError(
            f"{checkpoint} is of another run: {'; '.join(odd)}. Give it the old values, or leave "
            "--resume_from_checkpoint out to begin anew; what may differ is in docs/training.md"
        )
    _refuse_later(checkpoint)
    return found


def differences(theirs: Facts, mine: Facts) -> list[str]:
    """What keeps a checkpoint from being one of this run, old -> new; empty where nothing does."""
    old, new = _with_defaults(theirs["config"]), mine["config"]
    odd = [
        name for name in new if old.get(name) != new[name] and name not in FREE | OF_MODEL | OF_DATA
    ]  # fmt: skip
    found = [f"{name} {_word(old.get(name))} -> {_word(new[name])}" for name in odd]
    parts = [("base", OF_MODEL, "the model's weights"), ("data", OF_DATA, "the rows")]
    if _best_matters(new):
        parts.append(("evaluation", OF_DATA, "the rows to evaluate on"))
    for part, knobs, what in parts:
        if theirs[part] != mine[part]:
            named = [
                f"{k} {_word(old.get(k))} -> {_word(new[k])}"
                for k in sorted(knobs)
                if old.get(k) != new.get(k)
            ]
            found += named or [f"{what} are not the same under the same name"]
    if not found and (theirs["windows"], theirs["steps"]) != (mine["windows"], mine["steps"]):
        found.append(
            f"{theirs['steps']} steps of {theirs['windows']} windows -> {mine['steps']} of {mine['windows']}"
        )
    return list(dict.fromkeys(found))


def _best_matters(config: Mapping[str, Any]) -> bool:
    """Whether evaluations of the old and the new run are compared with each other."""
    return bool(
        config.get("metric_for_best_model")
        or config.get("early_stopping_patience")
        or config.get("load_best_model_at_end")
    )


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded config, with the defaults of knobs that are newer than it."""
    known = {name: field for name, field in SftConfig.model_fields.items() if not field.is_required()}
    return {**{name: field.get_default(call_default_factory=True) for name, field in known.items()}, **config}


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _newest(mine: Facts, output_dir: str, say: Say) -> Resume | None:
    """The newest sound checkpoint of this very run in `output_dir`."""
    others = []
    for run in runs_of(output_dir, mine["config"]["model"]):
        checkpoint = _sound(run, say)
        if checkpoint is None:
            continue
        facts = read_facts(checkpoint)
        odd = differences(facts, mine)
        if not odd:
            return Resume(checkpoint, facts)
        others.append(f"resume    {checkpoint} is of another run: {'; '.join(odd)}")
    for line in others[:OTHERS_NAMED]:
        say(line)
    say(f"resume    {output_dir} has no checkpoint of this run: a fresh start")
    return None


def _sound(run: Path, say: Say) -> Path | None:
    """The newest sound checkpoint of a run folder; damaged ones that are newer are named."""
    for checkpoint in reversed(checkpoints(run)):
        broken = damage(checkpoint)
        if broken is None:
            return checkpoint
        say(f"warning   {checkpoint.name} is passed over: {broken}")
    return None


def _refuse_later(checkpoint: Path) -> None:
    """Going on from an older checkpoint would mix two histories in one folder."""
    own = number_of(checkpoint)
    later = [p.name for p in checkpoints(checkpoint.parent) if number_of(p) > own and damage(p) is None]
    if later:
        raise UserError(
            f"{checkpoint.parent} has later checkpoints than {checkpoint.name} ({', '.join(later)}), and a "
            "run goes on in its own folder; move or remove them, or go on from the newest"
        )
