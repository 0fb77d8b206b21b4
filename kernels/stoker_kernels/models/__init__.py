"""Small models whose every hot op is ours; the training examples and the convergence tests use them."""

from __future__ import annotations

from stoker_kernels.models import lora
from stoker_kernels.models.bert import Bert, BertEncoder
from stoker_kernels.models.capture import CapturedStep
from stoker_kernels.models.causal import CausalLM
from stoker_kernels.models.config import (
    TransformerConfig,
    bert_base,
    gpt2_small,
    llama2_7b,
    llama3_8b,
)
from stoker_kernels.models.gpt import GPT, GPTConfig

__all__ = (
    "GPT",
    "Bert",
    "BertEncoder",
    "CapturedStep",
    "CausalLM",
    "GPTConfig",
    "TransformerConfig",
    "bert_base",
    "gpt2_small",
    "llama2_7b",
    "llama3_8b",
    "lora",
)
