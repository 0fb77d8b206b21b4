"""Small models whose every hot op is ours; the training examples and the convergence tests use them."""

from __future__ import annotations

from stoker_kernels.models import lora, prefix, prompt
from stoker_kernels.models.bert import Bert, BertEncoder
from stoker_kernels.models.capture import CapturedStep
from stoker_kernels.models.causal import CausalLM
from stoker_kernels.models.config import (
    TransformerConfig,
    bert_base,
    falcon_7b,
    falcon_40b,
    falcon_rw_1b,
    gpt2_small,
    llama2_7b,
    llama3_8b,
)
from stoker_kernels.models.gpt import GPT, GPTConfig
from stoker_kernels.models.t5 import T5, T5Config, t5_base, t5_small, t5_v1_1_small

__all__ = (
    "GPT",
    "T5",
    "Bert",
    "BertEncoder",
    "CapturedStep",
    "CausalLM",
    "GPTConfig",
    "T5Config",
    "TransformerConfig",
    "bert_base",
    "falcon_7b",
    "falcon_40b",
    "falcon_rw_1b",
    "gpt2_small",
    "llama2_7b",
    "llama3_8b",
    "lora",
    "prefix",
    "prompt",
    "t5_base",
    "t5_small",
    "t5_v1_1_small",
)
