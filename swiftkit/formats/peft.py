"""Adapters on disk are PEFT's: its names and its config, so that PEFT, vLLM and others load what we save."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit.errors import UserError
from swiftkit.support import OUTSIDE_LAYERS

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Parts of PEFT's LoRA that change what an adapter computes or holds, and that we do not have.
REFUSED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
FACTORS = (".lora_A", ".lora_B")  # PEFT's tensors of these names end in `.weight` besides
MAGNITUDE = ".lora_magnitude_vector"
EMBEDDING, HEAD = "embed_tokens", "lm_head"
SCORE = "score.weight"  # of a reward model: transformers' name for the head of a sequence classifier
START = "swiftkit_start"  # in the metadata of the tensors' file: with which values a PiSSA adapter began
# First values that leave the base as it is; others (PiSSA, OLoRA, LoftQ, ...) take them out of its weights.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraSpec:
    """The shape of an adapter (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    Args:
        rank: inner width r of the two factors.
        alpha: the adapter's output is scaled by alpha / rank.
        dropout: probability on the adapter's input, in training only.
        target_modules: `all-linear`, or last parts (or whole names) of module names.
        rslora: scale by alpha / sqrt(rank) instead (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732).
        dora: the length of each weight row is trained apart (Liu et al. 2024, https://arxiv.org/abs/2402.09353).
        pissa: the adapter starts as the weight's principal part, which leaves the base (Meng et al. 2024,
            https://arxiv.org/abs/2404.02948).
        pissa_rounds: of a randomized decomposition that finds that part; None is an exact one.
        modules_to_save: last parts (or whole names) of modules that are trained whole.
        vocabulary: rows of embedding and head, where they are more than the base has.
        keeps_tie: whether a head that is the embedding stays so when one of them is trained.
        scores: a reward model: a head [1, hidden] is trained beside it that scores an answer's last token.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("all-linear",)
    rslora: bool = False
    dora: bool = False
    pissa: bool = False
    pissa_rounds: int | None = None
    modules_to_save: tuple[str, ...] = ()
    vocabulary: int | None = None
    keeps_tie: bool = True
    scores: bool = False

    @property
    def scaling(self) -> float:
        """Factor on the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def features(self) -> set[str]:
        """Names of `support.FEATURES`."""
        inner = [name for name in self.modules_to_save if name.rpartition(".")[2] not in OUTSIDE_LAYERS]
        uses = {
            "dropout": self.dropout > 0,
            "rslora": self.rslora,
            "dora": self.dora,
            "pissa": self.pissa,
            "modules": len(inner) < len(self.modules_to_save),
            "inner_modules": bool(inner),
        }
        return {"lora", *(name for name, used in uses.items() if used)}

    def scaled_by_rank(self) -> LoraSpec:
        """The same adapter with its scaling written as alpha / rank."""
        return replace(self, alpha=self.scaling * self.rank, rslora=False)


def save_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    spec: LoraSpec,
    base_model: str,
    linear_names: Iterable[str],
    starts: Mapping[str, Tensor] | None = None,
    tied: bool = False,
) -> None:
    """Write a PEFT adapter.

    Args:
        folder: exists already.
        tensors: `<module>.lora_A` [rank, in], `<module>.lora_B` [out, rank], with DoRA
            `<module>.lora_magnitude_vector` [out]; and the parameters of modules that are trained whole.
        spec: rank, alpha and what else there is.
        base_model: where the base comes from, a hub id or a folder.
        linear_names: all linear modules of the base, to tell whether last parts of names say the targets.
        starts: the first values of the factors of a PiSSA adapter.
        tied: whether the output head is the embedding.
    """
    from safetensors.torch import save_file

    factors = {name: t for name, t in tensors.items() if name.endswith((*FACTORS, MAGNITUDE))}
    whole = {name: t for name, t in tensors.items() if name not in factors}
    metadata = {"format": "pt"}
    if spec.pissa:
        assert starts is not None, "what PiSSA took out of the base is known to the engine"
        factors, spec = _without_start(factors, starts, spec)
        metadata[START] = "pissa"
    targets = {name.rpartition(".")[0] for name in factors}
    modules, whole = _saved_whole(whole, tied)
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if spec.scores else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": shortest_names(targets, set(linear_names)),
        "modules_to_save": modules or None,
        "ensure_weight_tying": tied and EMBEDDING in modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    named = {f"{PREFIX}{_peft_name(name)}": t for name, t in {**factors, **whole}.items()}
    save_file({name: t.detach().cpu().contiguous() for name, t in named.items()}, folder / WEIGHTS, metadata)


def load_adapter(folder: Path) -> tuple[LoraSpec, dict[str, Tensor]]:
    """Read a PEFT LoRA adapter: its shape, targets by whole name, and tensors named as in `save_adapter`.

    Raises:
        UserError: for a folder without one, with damaged files, or with an adapter that uses parts of PEFT's
            LoRA that we do not have.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: it is not an adapter")
    config = _read_json(folder / CONFIG)
    spec = _spec_of(folder / CONFIG, config)
    found, _ = _read_tensors(folder / WEIGHTS)
    tensors = {_our_name(name): tensor for name, tensor in found.items()}
    if config.get("ensure_weight_tying"):  # PEFT wants the head beside the embedding that it is
        tensors = {name: t for name, t in tensors.items() if name != f"{HEAD}.weight"}
    factors = {name for name in tensors if name.endswith((*FACTORS, MAGNITUDE))}
    modules = {name.rpartition(".")[0] for name in tensors if name not in factors}
    wanted = config.get("modules_to_save") or []
    scores = SCORE in tensors
    if scores and tensors[SCORE].shape[0] != 1:
        raise UserError(f"{folder / WEIGHTS}: a classifier of {len(tensors[SCORE])} kinds is not served")
    modules -= {SCORE.rpartition(".")[0]} if scores else set()
    odd = next((m for m in sorted(modules) if not _named(m, wanted)), None)
    if odd is not None:
        raise UserError(f"{folder / WEIGHTS}: adapters with {odd} are not served")
    rows = [t.shape[0] for name, t in tensors.items() if name.rpartition(".")[0].endswith((EMBEDDING, HEAD))]
    return replace(
        spec,
        target_modules=tuple(sorted({name.rpartition(".")[0] for name in factors})),
        modules_to_save=tuple(sorted(modules)),
        vocabulary=max(rows, default=None),
        scores=scores,
    ), tensors


def load_trained(folder: Path) -> dict[str, Tensor]:
    """The tensors that `save_adapter` was given, also where what it wrote is another form of them."""
    _, tensors = load_adapter(folder)
    _, metadata = _read_tensors(folder / WEIGHTS)
    if metadata.get(START) != "pissa":
        return tensors
    halves = {}
    for name, tensor in tensors.items():
        if name.endswith(FACTORS):
            dimension = 0 if name.endswith(FACTORS[0]) else 1
            tensor = tensor.chunk(2, dimension)[0].contiguous()
        halves[name] = tensor
    return halves


def _without_start(
    factors: Mapping[str, Tensor], starts: Mapping[str, Tensor], spec: LoraSpec
) -> tuple[dict[str, Tensor], LoraSpec]:
    """A PiSSA adapter as one of the original base, with twice the rank.

    The base lost s B0 A0 and the adapter gives s B A, so to the base as it was it adds s (B A - B0 A0), which
    is s [B, -B0] [A; A0].
    """
    import torch

    doubled = {}
    for name, tensor in factors.items():
        start = starts[name].to(tensor.device)
        if name.endswith(FACTORS[0]):
            doubled[name] = torch.cat([tensor, start], 0)
        else:
            doubled[name] = torch.cat([tensor, -start], 1)
    growth = math.sqrt(2) if spec.rslora else 2
    return doubled, replace(spec, rank=2 * spec.rank, alpha=growth * spec.alpha, pissa=False)


def _saved_whole(whole: Mapping[str, Tensor], tied: bool) -> tuple[list[str], dict[str, Tensor]]:
    """PEFT's `modules_to_save`, and their tensors: with tied embeddings it asks for the head besides."""
    modules = sorted({name.rpartition(".")[0] for name in whole})
    embedding = next((name for name in whole if name.endswith(f"{EMBEDDING}.weight")), None)
    tensors = dict(whole)
    if tied and embedding is not None:
        tensors[f"{HEAD}.weight"] = whole[embedding].detach().clone()
    return [EMBEDDING if name.endswith(f".{EMBEDDING}") else name for name in modules], tensors


def _peft_name(name: str) -> str:
    return f"{name}.weight" if name.endswith(FACTORS) else name


def _our_name(name: str) -> str:
    name = name.removeprefix(PREFIX)
    return name.removesuffix(".weight") if name.removesuffix(".weight").endswith(FACTORS) else name


def _named(module: str, wanted: Iterable[str]) -> bool:
    """Whether one of these names means a module, as PEFT matches them."""
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as broken:
        raise UserError(f"{path} is cut or damaged ({broken}); take another checkpoint") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise UserError(f"{path} is not JSON ({broken}); take another checkpoint") from None
    return config


def _spec_of(path: Path, config: Mapping[str, Any]) -> LoraSpec:
    """The shape of the adapter in PEFT's config, once it is sure that nothing else matters."""
    refused = [name for name in REFUSED if config.get(name)]
    if config.get("peft_type") != "LORA":
        refused.append(f"peft_type {config.get('peft_type')}")
    if config.get("bias", "none") != "none":
        refused.append(f"bias {config['bias']}")
    if config.get("init_lora_weights") not in PLAIN_STARTS:
        refused.append(f"init_lora_weights {config['init_lora_weights']}")
    if refused:
        raise UserError(f"{path}: adapters with {', '.join(refused)} are not served")
    return LoraSpec(
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        dropout=float(config.get("lora_dropout", 0.0)),
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        keeps_tie=bool(config.get("ensure_weight_tying")),
    )


def shortest_names(targets: set[str], linear_names: set[str]) -> list[str]:
    """Last parts of the targets' names where these mean no other linear layer, else whole names."""
    leaves = {name.rpartition(".")[2] for name in targets}
    reached = {name for name in linear_names if name.rpartition(".")[2] in leaves}
    return sorted(leaves) if reached == targets else sorted(targets)
