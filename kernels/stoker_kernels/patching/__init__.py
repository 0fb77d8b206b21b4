"""Our kernels in a model of somebody else's, in place: ``stoker.kernels.apply(model)``.

Users call :func:`apply`; :func:`register_attention` alone makes ``attn_implementation="stoker"`` known to
transformers. What is recognised, exactly, stands in ``catalogue``; everything else stays as it is, and the
result says why. transformers is never imported from here for its own sake: a model of it has done so.
"""

from __future__ import annotations

from stoker_kernels.patching.applying import apply
from stoker_kernels.patching.attention import register_attention
from stoker_kernels.patching.report import Applied

__all__ = ("Applied", "apply", "register_attention")
