"""``stoker.kernels.apply`` with Trainer, accelerate, PEFT and Lightning: ``make interop``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

for name in ("accelerate", "lightning", "peft"):
    pytest.importorskip(name, reason=f"{name} is not installed: make interop")

import lightning
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from stoker_kernels import apply
from tests.kernels.patching._families import batch, build

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("default")
STEPS = 4


def rows() -> list[dict[str, torch.Tensor]]:
    """Twelve examples, padded on the right."""
    batches = [batch("right", seed) for seed in range(STEPS)]
    return [{key: b[key][i] for key in b} for b in batches for i in range(3)]


def model(*, kernels: bool) -> Any:
    made = build("llama")
    if kernels:
        assert not apply(made).left
    return made


def parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


def check(train: Any) -> None:
    """Train with our kernels and without: the same parameters."""
    for ours, theirs in zip(*(train(on) for on in (True, False)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(("compiled", "checkpointing"), [(False, True), (True, False)])
def test_trainer(tmp_path: Path, compiled: bool, checkpointing: bool) -> None:
    def train(kernels: bool) -> list[torch.Tensor]:
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=3, num_train_epochs=1, learning_rate=1e-2,
            adam_epsilon=1e-3, gradient_accumulation_steps=2, gradient_checkpointing=checkpointing,
            torch_compile=compiled, torch_compile_backend="aot_eager" if compiled else None,
            use_cpu=True, report_to=[], save_strategy="no", eval_strategy="epoch", disable_tqdm=True,
        )  # fmt: skip
        trained = model(kernels=kernels)
        trainer = Trainer(trained, arguments, train_dataset=rows(), eval_dataset=rows()[:3])
        trainer.train()
        logged = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        assert len(logged) == 1
        return [torch.tensor(logged), *parameters(trained)]

    check(train)


def test_accelerate() -> None:
    def train(kernels: bool) -> list[torch.Tensor]:
        AcceleratorState._reset_state(reset_partial_state=True)  # Trainer's, of this process
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        made = model(kernels=kernels)
        optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
        prepared, optimizer, loader = accelerator.prepare(
            made, optimizer, DataLoader(rows(), batch_size=3)
        )
        losses = []
        for inputs in loader:
            optimizer.zero_grad()
            loss = prepared(**inputs).loss
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        return losses

    ours, theirs = train(True), train(False)
    torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.01)  # products are bf16


@pytest.mark.parametrize("first", ["apply", "peft"])
def test_peft(first: str) -> None:
    def train(kernels: bool) -> list[torch.Tensor]:
        made = model(kernels=kernels and first == "apply")
        torch.manual_seed(0)
        config = LoraConfig(
            target_modules=["q_proj", "gate_proj", "lm_head"], init_lora_weights=False
        )
        adapted = get_peft_model(made, config)
        if kernels and first == "peft":
            assert "base_model.model.model.layers.0.mlp" in apply(adapted).replaced
        optimizer = torch.optim.AdamW(adapted.parameters(), lr=1e-2, eps=1e-3)
        for seed in range(STEPS):
            optimizer.zero_grad()
            adapted(**batch("left", seed)).loss.backward()
            optimizer.step()
        return parameters(adapted)

    check(train)


class Module(lightning.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, inputs: Any, index: int) -> torch.Tensor:
        return self.model(**inputs).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def test_lightning(tmp_path: Path) -> None:
    def train(kernels: bool) -> list[torch.Tensor]:
        made = model(kernels=kernels)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Module(made), DataLoader(rows(), batch_size=3))
        return parameters(made)

    check(train)
