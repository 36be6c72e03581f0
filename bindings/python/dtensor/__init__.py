"""Distributed tensors for libtorch: torch tensors that are laid out over a mesh of ranks (see docs/python.md)."""

import torch as _torch  # noqa: F401: its libraries must be loaded before ours

from dtensor._dtensor import (  # noqa: F401
    CommEvent,
    CommRecorder,
    DeviceMesh,
    Error,
    ImplicitReplication,
    RequireRules,
    World,
    distribute_tensor,
    explain,
    from_local,
    full_tensor,
    init_device_mesh,
    is_dtensor,
    mesh,
    placements,
    redistribute,
    run_ranks,
    spec,
    to_local,
)
