"""Fine-tune a model with LoRA under ZeRO: sums as questions and answers, packed into rows.

    python examples/finetune_lora.py [--ranks 2] [--zero 2] [--steps 60] [--gpus]

The loop is that of any sharded job (docs/how-to/sharded.md). Examples of different lengths share rows of
tokens, in which attention stays within each; prompts have no loss, frozen weights no gradients, and the
adapters' gradients and optimizer states are cut over the ranks.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from typing import Any

import stoker
import stoker.train

LENGTH = 96
SEQUENCES = 12
SYMBOLS = "0123456789+= \n"


def questions(count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts as "7+8=" and their answers as "15\\n", in tokens."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        one, other = draw.randrange(100), draw.randrange(10)
        texts = f"{one}+{other}=", f"{one + other}\n"
        prompt, answer = ([SYMBOLS.index(symbol) for symbol in text] for text in texts)
        found.append((prompt, answer))
    return found


def loop(ctx: Any, config: dict[str, Any]) -> None:
    """Train the adapters; every rank runs it."""
    import torch

    from stoker_kernels.models import GPT, GPTConfig
    from stoker_kernels.models.lora import inject
    from stoker_kernels.nn import Packing

    class Packed(torch.nn.Module):
        """A language model whose row of tokens holds several sequences."""

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, tokens: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor
        ) -> Any:
            """Map tokens, targets (1, T), cu_seqlens (1, sequences + 1) to the mean loss of answers."""
            return self.model(tokens, targets, Packing.of(cu_seqlens[0], LENGTH, LENGTH))

    base = GPT(
        GPTConfig(
            vocab_size=len(SYMBOLS), layers=2, heads=2, dim=64, block_size=LENGTH, full_logits=False
        )
    )
    inject(base, rank=16, alpha=32.0)
    frozen = sum(p.numel() for p in base.parameters() if not p.requires_grad)
    model = ctx.parallelize(Packed(base))
    trained = [p for p in ctx.parameters(model) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config["lr"])
    ctx.state(model=model, optimizer=optimizer, max_norm=1.0)
    rows = stoker.train.pack_examples(questions(4000, seed=1), LENGTH, max_sequences=SEQUENCES)
    dataset = [(row.tokens[0], row.cu_seqlens, row.targets[0]) for row in rows]
    loader = ctx.loader(dataset)
    ctx.report(frozen=frozen, trained=sum(p.numel() for p in trained))
    for _ in ctx.epochs(100):
        for tokens, cu_seqlens, targets in loader:
            loss = ctx.forward_backward({"tokens": tokens, "cu_seqlens": cu_seqlens}, targets)
            ctx.step(loss=loss)
            if ctx.step_number >= config["steps"]:
                return


def main() -> int:
    """Run it on a cluster of its own, or on the one that STOKER_ADDRESS names; 1 if it learned nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--zero", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    options = parser.parse_args()
    stoker.init(log_to_driver=False)
    trainer = stoker.train.ShardedTrainer(
        loop,
        plan=stoker.train.Strategy(data=options.ranks, zero=options.zero, micro_batches=4),
        config={"lr": 1e-2, "steps": options.steps},
        resources={"GPU": 1} if options.gpus else {"CPU": 1},
    )
    result = trainer.fit()
    if result.error:
        print(result.error, file=sys.stderr)
        return 1
    found, guess = result.metrics, math.log(len(SYMBOLS))
    print(
        f"{found['trained']:.0f} numbers trained, {found['frozen']:.0f} frozen; loss of the answers "
        f"{guess:.2f} for a guess, {found['loss']:.2f} after {result.steps} steps of "
        f"{trainer.progress()['plan']}"
    )
    return int(not found["loss"] < 0.8 * guess)


if __name__ == "__main__":
    sys.exit(main())
