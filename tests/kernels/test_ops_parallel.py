"""The operations in a model that torch wraps for several processes, in a process group of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from groupbench.kernels import ops


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 8) / 4)
        self.down = nn.Parameter(torch.randn(3, 8, 16) / 4)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        hidden = torch.relu(ops.grouped_mm(x, self.up.transpose(1, 2), offs))
        return ops.grouped_mm(hidden, self.down.transpose(1, 2), offs)


@pytest.fixture
def mesh(device: torch.device, tmp_path: Path) -> Iterator[DeviceMesh]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        yield init_device_mesh(device.type, (1,))
    finally:
        dist.destroy_process_group()


def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(14, 8, device=device), torch.tensor([4, 4, 14], dtype=torch.int32, device=device)


def step(model: nn.Module, x: Tensor, offs: Tensor) -> list[Tensor]:
    """Return the output and the gradients of a training step."""
    out = model(x, offs)
    out.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [out.detach(), *[grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in gradients]]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_training_step(way: str, mesh: DeviceMesh, device: torch.device) -> None:
    torch.manual_seed(0)
    model, (x, offs) = Experts().to(device), inputs(device)
    want = step(model, x, offs)
    model.zero_grad()
    wrapped = DistributedDataParallel(model) if way == "ddp" else fully_shard(model, mesh=mesh)
    for _ in range(2):
        torch.testing.assert_close(step(wrapped, x, offs), want)
        wrapped.zero_grad()


def test_tensors_spread_over_processes_are_refused(mesh: DeviceMesh, device: torch.device) -> None:
    x, offs = inputs(device)
    spread = [distribute_tensor(each, mesh, [Replicate()]) for each in (x, Experts().to(device).up.detach(), offs)]
    with pytest.raises((NotImplementedError, RuntimeError), match="grouped_mm"):
        ops.grouped_mm(spread[0], spread[1].transpose(1, 2), spread[2])
