"""AdamW, its learning rate over the steps, and the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_step

from swiftkit.config import DpoConfig, LoraKnobs, TrainKnobs

LEARNING_RATES = {"lora": 1e-4, "full": 1e-5}  # what `auto` is
POLICY_RATES = {"lora": 2e-5, "full": 1e-6}  # in dpo, which must stay near its reference
MASTER = "master"  # in an optimizer's state: the float32 value of a tensor of lower precision
CHUNK = 1 << 26  # numbers that are updated at once in float32
EMBEDDING = "embed_tokens.weight"
NARROW_FROM = 4096  # numbers of a tensor from which bitsandbytes has moments of 8 bits
SECOND_FACTORS = (".lora_B", ".lora_magnitude_vector")  # LoRA+ raises the rate of these


def adamw(parameters: Mapping[str, Tensor], knobs: TrainKnobs) -> torch.optim.Optimizer:
    """AdamW over the trained tensors; the rate is set anew each step by `set_rate`.

    Its state is that of torch's or bitsandbytes' AdamW. A tensor that is not float32 has its float32 value
    there besides (`master`), which is what is updated: bf16 cannot hold what a step of 1e-5 changes.

    Args:
        parameters: by name; LoRA+ (Hayou et al. 2024, https://arxiv.org/abs/2402.12354) goes by the names.
        knobs: rate, moments, decay (of matrices; not of norms, biases and DoRA's lengths), and which AdamW.
    """
    raised = knobs.loraplus_lr_ratio if isinstance(knobs, LoraKnobs) else None
    by_kind: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in parameters.items():
        ratio = raised if raised is not None and name.endswith(SECOND_FACTORS) else 1.0
        decay = knobs.weight_decay if parameter.dim() > 1 else 0.0
        by_kind.setdefault((ratio, decay), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": members, "ratio": ratio, "weight_decay": decay}
        for (ratio, decay), members in by_kind.items()
    ]
    options: dict[str, Any] = dict(lr=1.0, betas=(knobs.adam_beta1, knobs.adam_beta2), eps=1e-8)
    if knobs.optim == "adamw_8bit":
        optimizer = _adamw_8bit(groups, parameters, options)
    else:
        lower = any(p.dtype != torch.float32 for p in parameters.values())
        kind = MasterAdamW if lower else torch.optim.AdamW
        optimizer = kind(groups, **options, fused=next(iter(parameters.values())).is_cuda)
    set_rate(optimizer, peak_rate(knobs))
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of a step; groups with a ratio of their own get that many times it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("ratio", 1.0)


class MasterAdamW(torch.optim.AdamW):
    """AdamW of tensors in bf16 over float32 copies in its state (Micikevicius et al. 2017, section 3.1).

    Source: https://arxiv.org/abs/1710.03740. Gradients become float32 a few tensors at a time.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient."""
        for group in self.param_groups:
            for members in _chunks(p for p in group["params"] if p.grad is not None):
                self._update(group, members)

    def _update(self, group: dict[str, Any], members: list[Tensor]) -> None:
        states = [self._state(p, fused=group["fused"]) for p in members]
        masters = [state.get(MASTER, p) for state, p in zip(states, members, strict=True)]
        beta1, beta2 = group["betas"]
        adamw_step(
            masters,
            [p.grad.float() for p in members if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for p, master in zip(members, masters, strict=True):
            if p is not master:
                p.copy_(master)

    def _state(self, p: Tensor, *, fused: bool) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            # torch keeps the count on the device only where a kernel reads it.
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu")
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
            if p.dtype != torch.float32:
                state[MASTER] = p.detach().float()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put a state back; torch alone would round it to the tensors' own type."""
        super().load_state_dict(state_dict)
        order = [p for group in self.param_groups for p in group["params"]]
        for index, values in state_dict["state"].items():
            p = order[index]
            for name, value in values.items():
                if name != "step":
                    self.state[p][name] = value.to(device=p.device, dtype=torch.float32, copy=True)


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, up to CHUNK numbers together."""
    chunk: list[Tensor] = []
    for tensor in tensors:
        if chunk and sum(t.numel() for t in chunk) + tensor.numel() > CHUNK:
            yield chunk
            chunk = []
        chunk.append(tensor)
    if chunk:
        yield chunk


def _adamw_8bit(
    groups: list[dict[str, Any]], parameters: Mapping[str, Tensor], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW with moments of 8 bits (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861).

    Embeddings keep moments of 32 bits, as its authors advise: their gradients are sparse.
    """
    from bitsandbytes.optim.adamw import AdamW8bit

    wide = {id(p) for name, p in parameters.items() if name.endswith(EMBEDDING)}

    class MasterAdamW8bit(AdamW8bit):
        """The same over float32 copies of tensors of lower precision."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.non_castable_tensor_keys: set[str] = {*self.non_castable_tensor_keys, MASTER}

        def get_config(self, gindex: int, pindex: int, group: Any) -> dict[str, Any]:
            # Of bitsandbytes' own list nothing is taken: it lasts beyond an optimizer, by numbers of tensors.
            config: dict[str, Any] = super().get_config(gindex, pindex, group)
            return {**config, "optim_bits": 32 if id(group["params"][pindex]) in wide else 8}

        @torch.no_grad()
        def init_state(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            super().init_state(group, p, gindex, pindex)
            if p.dtype != torch.float32:
                self.state[p][MASTER] = p.detach().float()

        @torch.no_grad()
        def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            master = self.state[p].get(MASTER)
            if master is None:
                super().update_step(group, p, gindex, pindex)
                return
            # It finds value and gradient in the parameter: the master stands in for the time of the update.
            own, gradient = p.data, p.grad
            assert gradient is not None
            p.grad, p.data = None, master
            p.grad = gradient.float()
            super().update_step(group, p, gindex, pindex)
            p.grad, p.data = None, own.copy_(master)
            p.grad = gradient

    return MasterAdamW8bit(groups, **options)


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> int:
    """Bytes of the state that an optimizer has, or will have after a step, for these tensors.

    Two moments a number, of 4 bytes, or of 1 with their scales and tables; a float32 value where the tensor
    is of lower precision. Step counts are left out.
    """
    eight = getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8
    total = 0
    for name, parameter in parameters.items():
        size = parameter.numel()
        narrow = eight and size >= NARROW_FROM and not name.endswith(EMBEDDING)
        total += 2 * (size + 4 * math.ceil(size / 256) + 1024) if narrow else 8 * size
        total += 0 if parameter.dtype == torch.float32 else 4 * size
    return total


def peak_rate(knobs: TrainKnobs) -> float:
    """The peak learning rate; `auto` goes by what is trained."""
    if knobs.learning_rate != "auto":
        return knobs.learning_rate
    rates = POLICY_RATES if isinstance(knobs, DpoConfig) else LEARNING_RATES
    return rates[knobs.tuner_type if isinstance(knobs, LoraKnobs) else "lora"]


def learning_rate(step: int, steps: int, knobs: TrainKnobs) -> float:
    """The rate of a step (counted from 0): a linear rise over the warm-up, then the schedule down to 0.

    The first step already moves, and the last one still does.
    """
    peak = peak_rate(knobs)
    warmup = math.ceil(steps * knobs.warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    if knobs.lr_scheduler_type == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak * (1 - done) if knobs.lr_scheduler_type == "linear" else peak


def clip_gradients(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients so that their common norm is at most `max_norm` (0: never), without reading it.

    Args:
        parameters: their gradients change.
        norm: of the whole gradient, [].
        max_norm: at most.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if max_norm > 0:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
