"""``python -m benchmarks.kernels.step``: a whole training step with our kernels, beside PyTorch's.

One model, four ways: ours, ours as one CUDA graph, PyTorch's ops eagerly, and those under torch.compile.
Forward, backward and optimizer; the table gives tokens per second, the share of the machine's matrix
rate (6 flops per parameter and token, plus attention), and memory at the peak.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.__main__ import describe
from benchmarks.kernels.timing import Timing, ceilings, device_name, timed
from stoker_kernels.models import (
    CapturedStep,
    CausalLM,
    TransformerConfig,
    gpt2_small,
    llama3_8b,
)

PROFILED_STEPS = 3

MODELS: dict[str, Callable[..., TransformerConfig]] = {
    "mini": partial(gpt2_small, layers=2, heads=2, dim=64, vocab_size=257),
    "gpt2": gpt2_small,
    "llama-1b": partial(llama3_8b, layers=16, dim=2048, heads=32, hidden=8192),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.kernels.step", description=__doc__)
    made.add_argument("--model", choices=MODELS, default="gpt2")
    made.add_argument("--batch", type=int, default=16, help="sequences (16)")
    made.add_argument("--seq-len", type=int, default=1024, help="tokens of each (1024)")
    made.add_argument("--device", choices=("cuda", "cpu"), default=device_name())
    made.add_argument(
        "--profile", type=int, default=0, metavar="N",
        help="also list, for each provider, the N kernels that take most of a step",
    )  # fmt: skip
    return made


def steps(options: argparse.Namespace) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return, by provider, what builds its step: each model is made when its turn comes."""
    found = {"stoker": partial(_step, options, "stoker"), "eager": partial(_step, options, "torch")}
    if options.device == "cuda":
        found["stoker graph"] = partial(_captured, options)
        found["compile"] = partial(_step, options, "torch", compiled=True)
    return found


def _model(
    options: argparse.Namespace, ops: str
) -> tuple[CausalLM, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    config = MODELS[options.model](ops=ops, dropout=0.0, block_size=options.seq_len)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = CausalLM(config).to(options.device, dtype)
    tokens = torch.randint(
        config.vocab_size, (options.batch, options.seq_len), device=options.device
    )
    return model, (tokens, tokens.roll(-1, 1))


def _step(options: argparse.Namespace, ops: str, compiled: bool = False) -> Callable[[], Any]:
    model, (tokens, targets) = _model(options, ops)
    if ops == "torch":
        fused = options.device == "cuda"
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    else:
        optimizer = model.optimizer(lr=1e-4)
    run: Any = torch.compile(model) if compiled else model

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = run(tokens, targets)[1]
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _captured(options: argparse.Namespace) -> Callable[[], Any]:
    model, inputs = _model(options, "stoker")
    return partial(CapturedStep(model, model.optimizer(lr=1e-4), inputs), *inputs)


def profiled(provider: str, step: Callable[[], Any], options: argparse.Namespace) -> Table:
    """Return what of one step's device time each kernel takes, by ``torch.profiler``."""
    cuda = options.device == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(PROFILED_STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
    found = [
        (event.self_device_time_total if cuda else event.self_cpu_time_total, event)
        for event in profile.key_averages()
    ]
    total_ms = sum(us for us, _ in found) / PROFILED_STEPS / 1e3
    title = f"{provider}: {total_ms:.2f} ms in kernels"
    table = Table("kernel", title=title, title_justify="left")
    for heading in ("ms", "launches"):
        table.add_column(heading, justify="right")
    for us, event in sorted(found, key=lambda pair: -pair[0])[: options.profile]:
        table.add_row(
            event.key[:100],
            f"{us / PROFILED_STEPS / 1e3:.3f}",
            f"{event.count / PROFILED_STEPS:.4g}",
        )
    return table


def flops_per_step(config: TransformerConfig, batch: int, seq_len: int) -> float:
    """6 N per token (Kaplan et al. 2020), plus the causal attention products, 3.5 times the forward's."""
    attention = 3.5 * 2 * batch * seq_len**2 * config.dim * config.layers
    return 6.0 * config.parameter_count * batch * seq_len + attention


def main(argv: list[str] | None = None) -> int:
    """Measure every provider in turn and print the table."""
    options = parser().parse_args(argv)
    limits = ceilings(options.device)
    config = MODELS[options.model](block_size=options.seq_len)
    flops = flops_per_step(config, options.batch, options.seq_len)
    timings: dict[str, Timing] = {}
    for provider, build in steps(options).items():
        step = build()
        timings[provider] = timed(step, options.device, lambda: None)
        if options.profile:
            Console(width=140).print(profiled(provider, step, options))
        del step
        torch._dynamo.reset()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    title = (
        f"{options.model}, {config.parameter_count / 1e6:.0f} M parameters, "
        f"{options.batch} x {options.seq_len} tokens, {describe(options.device)}"
    )
    table = Table("provider", title=title, title_justify="left")
    for heading in ("ms", "20-80 %", "tokens/s", "of matrix rate", "peak MB", "times eager"):
        table.add_column(heading, justify="right")
    for provider, timing in timings.items():
        seconds = timing.median_ms / 1e3
        table.add_row(
            provider, f"{timing.median_ms:.4g}", f"{timing.low_ms:.4g}-{timing.high_ms:.4g}",
            f"{options.batch * options.seq_len / seconds:,.0f}",
            f"{flops / seconds / limits.matmul_flops_per_s:.1%}",
            f"{timing.peak_nbytes / 1e6:.4g}",
            f"{timings['eager'].median_ms / timing.median_ms:.2f}",
        )  # fmt: skip
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
