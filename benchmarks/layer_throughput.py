"""Speed of the fused decoder layer at a model's true shape, with random weights.

    python benchmarks/layer_throughput.py --base fp8 --layers 32

prints forward and backward milliseconds of a layer, tokens/s of a whole step (embedding, layers, norm, head,
loss, AdamW), memory, loss and gradient norm, and the kernels that the time goes to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swiftkit.engine.attention import AttentionPlan
from swiftkit.engine.fused.layer import LINEARS, FusedLlamaLayer, LayerShape, Surroundings
from swiftkit.engine.kernels.cross_entropy import Fp8Head, cross_entropy
from swiftkit.engine.kernels.rope import Heads
from swiftkit.formats.peft import LoraSpec

SHAPES = {
    "llama3-8b": (LayerShape(4096, 14336, Heads(32, 8, 128)), 128256),
    "llama3-70b": (LayerShape(8192, 28672, Heads(64, 8, 128)), 128256),
    "qwen2.5-7b": (LayerShape(3584, 18944, Heads(28, 4, 128), eps=1e-6, qkv_bias=True), 152064),
}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--base", choices=["plain", "fp8", "nf4", "nf4-fp8"], default="fp8")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--documents", type=int, default=4, help="a step")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--uneven", action="store_true", help="documents of 1/2 and 3/2 of the length")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8, help="timed back to back, after three to warm up")
    parser.add_argument("--one_copy", action="store_true", help="FP8 weights without the transposed copy")
    parser.add_argument("--fp8_head", action="store_true", help="the head's gradient product in FP8")
    parser.add_argument("--recompute_mlp", action="store_true")
    parser.add_argument("--profile", type=int, default=0, help="kernels to list")
    parser.add_argument("--json", type=Path, help="append the numbers to this file, one line a run")
    return parser.parse_args()


class Model(nn.Module):
    """Embedding, fused layers, norm and head with random weights."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.shape, self.vocabulary = SHAPES[args.shape]
        device = torch.device("cuda")
        lora = {name: LoraSpec(rank=args.rank, alpha=2.0 * args.rank) for name in LINEARS}
        self.layers = nn.ModuleList()
        for index in range(args.layers):
            layer = FusedLlamaLayer(
                self.shape, base=args.base, lora=lora, device=device, two_copies=not args.one_copy,
                recompute_mlp=args.recompute_mlp,
            )  # fmt: skip
            fill(layer, seed=index)
            self.layers.append(layer)
        make = {"dtype": torch.bfloat16, "device": device}
        self.embedding = torch.randn(self.vocabulary, self.shape.hidden, **make) * 0.02
        self.head = torch.randn(self.vocabulary, self.shape.hidden, **make) * 0.02
        self.fp8_head = Fp8Head.of(self.head) if args.fp8_head else None
        self.norm = torch.ones(self.shape.hidden, **make)

    def forward(self, tokens: Tensor, targets: Tensor, around: Surroundings) -> Tensor:
        """The mean loss."""
        x = F.embedding(tokens, self.embedding)
        for layer in self.layers:
            x = layer(x, around)
        x = F.rms_norm(x, (self.shape.hidden,), self.norm, self.shape.eps)
        return cross_entropy(x, self.head, targets, chunk=4096, fp8=self.fp8_head) / targets.numel()


def fill(layer: FusedLlamaLayer, *, seed: int) -> None:
    """Random frozen weights; adapters as a run starts, but with a B that is not zero."""
    torch.manual_seed(seed)
    for name in LINEARS:
        linear = layer.get_submodule(name)
        weight = torch.randn(layer.shape.out_in(name), dtype=torch.bfloat16, device="cuda") * 0.02
        layer.load({f"{name}.weight": weight})
        assert isinstance(linear.lora_A, Tensor) and isinstance(linear.lora_B, Tensor)
        with torch.no_grad():
            linear.lora_A.normal_(std=linear.lora_A.shape[1] ** -0.5)
            linear.lora_B.normal_(std=1e-3)


def surroundings(args: argparse.Namespace, shape: LayerShape) -> Surroundings:
    """Rotary tables and plan of the documents."""
    device = torch.device("cuda")
    frequencies = 500000.0 ** -(torch.arange(0, shape.heads.width, 2, device=device) / shape.heads.width)
    lengths = [args.length] * args.documents
    if args.uneven:
        lengths = [args.length // 2, args.length * 3 // 2] * (args.documents // 2)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    angles = positions[:, None] * frequencies
    angles = torch.cat([angles, angles], 1)
    plan = AttentionPlan.of(lengths, device=device)
    return Surroundings(angles.cos().bfloat16(), angles.sin().bfloat16(), plan)


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Median of CUDA-event times."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def time_layer(model: Model, around: Surroundings, repeats: int) -> dict[str, float]:
    """Forward and backward of one layer in the middle of the model (its input wants a gradient)."""
    layer = model.layers[len(model.layers) // 2]
    x = torch.randn(around.cos.shape[0], model.shape.hidden, dtype=torch.bfloat16, device="cuda")
    x.requires_grad_()
    out = layer(x, around)
    upstream = torch.randn_like(out) * 1e-4
    out.backward(upstream)
    forward, backward = [], []
    for _ in range(repeats):
        kept: list[Tensor] = []
        forward.append(median_ms(lambda kept=kept: kept.append(layer(x, around)), 1))  # type: ignore[misc]
        backward.append(median_ms(lambda kept=kept: kept.pop().backward(upstream), 1))  # type: ignore[misc]
    return {"forward_ms": statistics.median(forward), "backward_ms": statistics.median(backward)}


def main() -> None:
    """Build, time, profile, print."""
    args = parse()
    began = time.perf_counter()
    model = Model(args)
    around = surroundings(args, model.shape)
    count = args.documents * args.length
    tokens, targets = (torch.randint(0, model.vocabulary, (count,), device="cuda") for _ in range(2))
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4, fused=True)
    seen: dict[str, Tensor] = {}

    def step() -> None:
        loss = model(tokens, targets, around)
        loss.backward()
        grads = [p.grad for p in adapters if p.grad is not None]
        seen["gradient_norm"] = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        seen["loss"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    torch.cuda.synchronize()
    result: dict[str, float | str] = {"base": args.base, "layers": args.layers, "documents": args.documents}
    result |= {"length": args.length, "first_step_s": time.perf_counter() - began}
    result |= {name: float(value) for name, value in seen.items()}
    result |= time_layer(model, around, 10)
    optimizer.zero_grad(set_to_none=True)
    step(), step()
    torch.cuda.reset_peak_memory_stats()
    result["step_ms"] = median_ms(lambda: [step() for _ in range(args.steps)], 1) / args.steps
    result["tokens_per_s"] = count / float(result["step_ms"]) * 1e3
    result["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
    result["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    host = time.perf_counter()
    step()
    result["host_ms"] = (time.perf_counter() - host) * 1e3
    torch.cuda.synchronize()
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}))
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(result) + "\n")
    if args.profile:
        print(kernel_table(step, args.profile))


def kernel_table(step: Callable[[], None], rows: int) -> str:
    """The kernels of one step by their total time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    totals: dict[str, tuple[float, int]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            ms, calls = totals.get(event.name, (0.0, 0))
            totals[event.name] = ms + event.device_time / 1e3, calls + 1
    whole = sum(ms for ms, _ in totals.values())
    lines = [f"{'ms':>9} {'share':>6} {'calls':>6}  kernel", f"{whole:9.2f} {'':6} {'':6}  all"]
    for name, (ms, calls) in sorted(totals.items(), key=lambda item: -item[1][0])[:rows]:
        lines.append(f"{ms:9.2f} {ms / whole:6.1%} {calls:6d}  {name[:100]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
