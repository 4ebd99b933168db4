"""Models whose attention heads are split over processes, which cannot be captured by one of them.

    check_not_split(module)      # a UserError if tensor parallelism leaves each process its own heads

transformers splits a model with `DistributedConfig(tp_size=N)`, torch with `parallelize_module`. Each process then
computes the attention of H/N heads, and a mean over heads would silently be one over the local ones.
"""

from __future__ import annotations

import torch
from torch import nn

from floatscope.errors import UserError

OTHER_MESH_AXES = ("fsdp", "efsdp", "dp", "dp_shard", "dp_shard_cp", "ep", "pp")
"""Axes of a device mesh that leave attention whole: weights are gathered before use, or only experts are split."""


def check_not_split(module: nn.Module) -> None:
    """Refuse a module with tensor-parallel weights."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.tensor import DTensor

    for name, weight in module.named_parameters():
        if not isinstance(weight, DTensor):
            continue
        mesh = weight.device_mesh
        axes = mesh.mesh_dim_names or ("",) * mesh.ndim
        for axis, size, placement in zip(axes, mesh.shape, weight.placements, strict=True):
            if placement.is_shard() and size > 1 and axis not in OTHER_MESH_AXES:
                raise UserError(
                    f"'{name}' is split over {size} processes (tensor parallelism): each process sees only its own"
                    " attention heads, which floatscope does not gather; open the model without tp_size, on one device"
                    " or with device_map='auto'"
                )
