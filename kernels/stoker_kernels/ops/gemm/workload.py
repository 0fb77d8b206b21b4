"""The workloads of all ops of this folder."""

from __future__ import annotations

from stoker_kernels.ops.gemm.fp8 import workload as fp8
from stoker_kernels.ops.gemm.fused_dense import workload as fused_dense
from stoker_kernels.ops.gemm.grouped import workload as grouped

WORKLOADS = (*fused_dense.WORKLOADS, *grouped.WORKLOADS, *fp8.WORKLOADS)
