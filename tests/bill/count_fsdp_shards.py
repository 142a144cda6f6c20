"""Shard a small model with `fully_shard` as some rank of many would and print what it allocates.

One process with a fake process group: collectives do nothing, sizes are those of a real run.
Arguments: triples of ranks, rank and stage, such as `3,2,3`. Prints a JSON list.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

HIDDEN, INNER, VOCABULARY, LAYERS = 16, 26, 97, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(self.up(self.frozen(self.norm(hidden))))
        return hidden + inner


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


def fsdp_parameters(model: nn.Module) -> Iterator[object]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


def storages(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages of tensors."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def count(ranks: int, rank: int, stage: int) -> dict[str, object]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model = Model()
    named = [(name, list(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=stage == 3)
    shards = list(fsdp_parameters(model))
    whole: list[int] = []
    for layer in model.layers:
        layer.down.register_forward_hook(
            lambda *_: whole.append(storages([t for p in shards for t in p.all_gather_outputs]))
        )
    model(torch.arange(8)[None]).sum().backward()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    locals_of_states = [v.to_local() if hasattr(v, "to_local") else v for v in states]
    dist.destroy_process_group()
    return {
        "named": named,
        "parameters": storages([p._sharded_param_data for p in shards]),
        "gradients": storages(
            [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        ),
        "optimizer states": storages(locals_of_states),
        "whole": max(whole),
    }


if __name__ == "__main__":
    cases = [tuple(map(int, argument.split(","))) for argument in sys.argv[1:]]
    print(json.dumps([count(*case) for case in cases]))
