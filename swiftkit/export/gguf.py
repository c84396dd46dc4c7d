"""`--gguf`: a merged model through llama.cpp's own converter, where it is on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from swiftkit.errors import UserError
from swiftkit.formats.gguf import tensor_count
from swiftkit.hub import Say

SCRIPT = "convert_hf_to_gguf.py"
HOME = "LLAMA_CPP"


@dataclass(frozen=True)
class Converter:
    """llama.cpp's converter, and what is asked of it.

    Args:
        script: its path.
        out: the file to make.
        kind: its --outtype.
    """

    script: Path
    out: Path
    kind: str

    def command(self, model: Path, out: Path) -> list[str]:
        """The command line for a model folder."""
        # fmt: off
        return [sys.executable, str(self.script), str(model), "--outfile", str(out), "--outtype", self.kind]
        # fmt: on

    def convert(self, model: Path, say: Say) -> None:
        """Convert a model folder; the file gets its name when it is whole.

        Raises:
            UserError: the converter fails or leaves no GGUF file; the model folder stays as it is.
        """
        beside = self.out.with_name(f".{self.out.name}.partial")
        beside.unlink(missing_ok=True)
        say(f"gguf      {self.script} --outtype {self.kind}")
        try:
            done = subprocess.run(self.command(model, beside), capture_output=True, text=True)
            if done.returncode:
                raise UserError(
                    f"{self.script} failed with exit code {done.returncode}: {_last_line(done.stderr)}; the "
                    f"merged model stands in {model}. It ran in {sys.executable}, which needs the packages "
                    "that llama.cpp's requirements name"
                )
            if not beside.is_file():
                raise UserError(
                    f"{self.script} ended well but wrote no file; the merged model stands in {model}"
                )
            tensors = tensor_count(beside)
            os.replace(beside, self.out)
        finally:
            beside.unlink(missing_ok=True)
        say(f"          {self.out}, {tensors} tensors, {self.out.stat().st_size / 1e9:,.2f} GB")


def prepare(out: str, kind: str) -> Converter:
    """Find the converter, before the work.

    Raises:
        UserError: it is not here, or the file to make cannot be made.
    """
    target = Path(out).expanduser().absolute()
    if target.suffix != ".gguf":
        raise UserError(f"--gguf {out}: llama.cpp's files end in .gguf; give such a name")
    if target.exists():
        raise UserError(f"--gguf {out} exists already; give another name, or remove it first")
    if not target.parent.is_dir():
        raise UserError(f"--gguf {out}: {target.parent} is no folder")
    return Converter(_find(), target, kind)


def _find() -> Path:
    home = os.environ.get(HOME)
    if home:
        script = Path(home).expanduser() / SCRIPT
        if not script.is_file():
            raise UserError(f"{HOME} is {home}, which has no {SCRIPT}; point it to a checkout of llama.cpp")
        return script.absolute()
    found = shutil.which(SCRIPT)
    if found is None:
        raise UserError(
            f"--gguf needs llama.cpp's {SCRIPT}, which is neither on PATH nor named by {HOME}: "
            f"git clone https://github.com/ggml-org/llama.cpp, then set {HOME}=llama.cpp"
        )
    return Path(found)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
