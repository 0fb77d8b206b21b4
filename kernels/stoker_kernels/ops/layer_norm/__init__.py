"""LayerNorm over the last dimension, optionally of a dropped-out input plus the residual stream."""

from __future__ import annotations

from stoker_kernels.ops.layer_norm.autograd import DropoutAddLayerNorm, LayerNorm, layer_norm
from stoker_kernels.ops.layer_norm.reference import dropout_mask

__all__ = ("DropoutAddLayerNorm", "LayerNorm", "dropout_mask", "layer_norm")
