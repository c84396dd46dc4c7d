"""A run is a folder; `Run` is a view of that folder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit.data.template import BUILTIN
from swiftkit.errors import UserError
from swiftkit.formats.checkpoints import ARGS as ARGS
from swiftkit.formats.checkpoints import checkpoints as checkpoints
from swiftkit.formats.named import folder_name, is_model_folder
from swiftkit.train.log import FILE

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from swiftkit.generate.session import Session

SAMPLES = "samples.json"
BEST = "best.json"
LOCK = ".lock"
PACKAGES = ("swiftkit", "torch", "transformers", "tokenizers", "safetensors")


def check_output_dir(output_dir: str) -> None:
    """Make the folder that runs go to.

    Raises:
        UserError: when nothing can be written there.
    """
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            return
    except FileExistsError:
        raise UserError(f"--output_dir {output_dir} is a file; give a folder") from None
    except OSError as failure:
        raise UserError(
            f"--output_dir {output_dir}: {failure.strerror or failure}; give a folder that can be written to"
        ) from None


def create_folder(output_dir: str, model: str, *, now: datetime | None = None) -> Path:
    """Make `<output_dir>/<model>/v<N>-<date>-<time>`, with the lowest N that no run of the model has.

    Two runs that start at once get two folders.
    """
    parent = _home(output_dir, model)
    parent.mkdir(parents=True, exist_ok=True)
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    while True:
        taken = [int(m[1]) for path in parent.iterdir() if (m := re.match(r"v(\d+)-", path.name))]
        number = max(taken, default=-1) + 1
        folder = parent / f"v{number}-{stamp}"
        try:
            folder.mkdir()
        except FileExistsError:  # another run, in the same second
            continue
        return folder


def runs_of(output_dir: str, model: str) -> list[Path]:
    """The run folders of a model, the newest first."""
    parent = _home(output_dir, model)
    found = [(int(m[1]), p) for p in parent.glob("v*-*") if (m := re.match(r"v(\d+)-", p.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _home(output_dir: str, model: str) -> Path:
    return Path(output_dir) / re.sub(r"[^\w.-]+", "-", folder_name(model))


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Keep a run folder to this process while it trains; the lock ends with the process, however it ends.

    Raises:
        UserError: when another process has it.
    """
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is training in this run folder") from None
        yield


def write_args(folder: Path, *, method: str, config: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write `args.json`: the resolved config (it replays the run), versions, and what the run was made of."""
    content = {"method": method, "config": _anywhere(config), "versions": versions(), **facts}
    write_whole(folder / ARGS, content)


def write_whole(path: Path, content: Any) -> None:
    """Write JSON so that a file of this name is never half there."""
    beside = path.with_name(f".{path.name}")
    with beside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _anywhere(config: dict[str, Any]) -> dict[str, Any]:
    """The config with absolute paths in place of relative ones: it holds in every working directory."""

    def absolute(value: str) -> str:
        for path, rows in ((value, ""), (value.rpartition("#")[0], f"#{value.rpartition('#')[2]}")):
            if path and Path(path).exists():
                return f"{Path(path).resolve()}{rows}"
        return value

    lists = ("dataset", "val_dataset", "new_tokens")
    files = {name: [absolute(source) for source in config[name]] for name in lists if name in config}
    named = {
        "model": is_model_folder(config["model"]),
        "chat_template": _is_file(config["chat_template"]),
        "init_adapter": config.get("init_adapter") is not None,
    }
    paths = {name: str(Path(config[name]).expanduser().resolve()) for name, here in named.items() if here}
    return {**config, **files, **paths}


def _is_file(chat_template: str | None) -> bool:
    return chat_template is not None and chat_template not in BUILTIN


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a source tree that was never installed
            found[package] = "unknown"
    return found


class Run:
    """What a run left: metrics, plots, samples, and its adapter.

    Args:
        folder: the run folder.

    Raises:
        UserError: if it is not one.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        if not (self.folder / ARGS).is_file():
            raise UserError(f"{self.folder} has no {ARGS}: it is not a run folder")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def args(self) -> dict[str, Any]:
        """The content of `args.json`."""
        content: dict[str, Any] = json.loads((self.folder / ARGS).read_text(encoding="utf-8"))
        return content

    @property
    def metrics(self) -> DataFrame:
        """One row a log line: `step`, `loss`, `learning_rate`, ..., `eval_loss` where it was evaluated."""
        import pandas

        lines = (self.folder / FILE).read_text(encoding="utf-8").splitlines()
        return pandas.DataFrame([json.loads(line) for line in lines])

    @property
    def adapter_dir(self) -> Path:
        """The run's result: its last checkpoint, or its best one where the run was asked for that.

        Raises:
            UserError: when none was written.
        """
        found = checkpoints(self.folder)
        if not found:
            raise UserError(f"{self.folder} has no checkpoint")
        best = self.best
        if best is not None and self.args["config"].get("load_best_model_at_end"):
            return self.folder / str(best["checkpoint"])
        return found[-1]

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation of a run that looked for it: `checkpoint`, `metric` and `value`."""
        path = self.folder / BEST
        content: dict[str, Any] | None = (
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        )
        return content

    @property
    def samples(self) -> list[dict[str, str]]:
        """Prompts with their answers `before` and `after`."""
        path = self.folder / SAMPLES
        content: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        return content

    def plot(self, curve: str = "loss") -> Figure:
        """A matplotlib figure of `loss`, `learning_rate` or `tokens_per_second` over the steps."""
        from swiftkit.train import plots

        if curve not in plots.CURVES:
            raise UserError(f"no curve {curve!r}; there are {', '.join(plots.CURVES)}")
        return plots.curve(self.metrics, curve)

    def chat(self, **options: Any) -> Session:
        """The tuned model, ready to be asked: `run.chat().ask("Who are you?")`.

        Args:
            options: knobs of `swiftkit chat`, such as `temperature`.
        """
        from swiftkit.config import ChatConfig, build
        from swiftkit.generate.session import Session

        return Session.open(build(ChatConfig, {"adapters": str(self.adapter_dir), **options}))


def write_samples(folder: Path, samples: Sequence[dict[str, str]]) -> None:
    """Write prompts with their answers before and after."""
    (folder / SAMPLES).write_text(
        json.dumps(list(samples), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
