"""The transformer of bench_train on PyTorch's own DTensor and FSDP2, over Gloo: python3 bench/train/upstream.py [rounds]"""
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCABULARY, CONTEXT, HEADS, LAYERS, BATCH = 95, 64, 4, 2, 32


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.wq, self.wk, self.wv, self.wo = (torch.nn.Linear(width, width) for _ in range(4))
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def attention(self, x, future):
        def split(y):
            return y.reshape(y.size(0), y.size(1), -1, self.head).transpose(1, 2)

        q, k, v = split(self.wq(x)), split(self.wk(x)), split(self.wv(x))
        weights = torch.softmax(q @ k.transpose(2, 3) * self.head ** -0.5 + future, -1)
        y = (weights @ v).transpose(1, 2)
        return self.wo(y.reshape(y.size(0), y.size(1), -1))

    def forward(self, x, future):
        x = x + self.attention(self.norm1(x), future)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.register_buffer("future", torch.full((CONTEXT, CONTEXT), -1e9).triu(1))
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(LAYERS))
        for block in self.blocks:
            block.head = width // HEADS
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text):
        x = self.tokens(text) + self.positions
        for block in self.blocks:
            x = block(x, self.future)
        return self.head(self.norm(x))


def speed(way, width, ranks, steps):
    torch.manual_seed(1)
    model = Gpt(width)
    mesh = init_device_mesh("cpu", (ranks,)) if way != "plain" else None
    text = torch.randint(0, VOCABULARY, (BATCH, CONTEXT))
    if way == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        text = text.chunk(ranks)[dist.get_rank()]
    elif way == "dp":
        distribute_module(model, mesh)
        text = distribute_tensor(text, mesh, [Shard(0)])
    elif way == "tp":
        plan = {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel(), "wo": RowwiseParallel(),
                "up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    seconds = 0
    for step in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        logits = model(text)
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), text.reshape(-1))
        loss.backward()
        optimizer.step()
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
        if step > 1:
            seconds += time.perf_counter() - start
    return BATCH * CONTEXT * (steps - 2) / seconds


def work(rank, ranks, ways, widths, rounds, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29547", RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(max(1, os.cpu_count() // ranks))
    dist.init_process_group("gloo")
    for width in widths:
        for way in ways:
            try:
                best = max(speed(way, width, ranks, 16 if width < 512 else 8) for _ in range(rounds))
                if rank == 0:
                    results[(width, ranks, way)] = best
            except Exception as error:  # upstream has no way for it: that is a result too
                if rank == 0:
                    results[(width, ranks, way)] = str(error).splitlines()[0][:60]
    dist.destroy_process_group()


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    widths = [64, 128, 256, 512]
    results = mp.Manager().dict()
    mp.spawn(work, (1, ["plain", "dp"], widths, rounds, results), nprocs=1)
    mp.spawn(work, (2, ["dp", "fsdp", "tp"], widths, rounds, results), nprocs=2)
    print(f"PyTorch {torch.__version__}, {os.cpu_count()} cores; tokens/s, the best of {rounds} rounds")
    for (width, ranks, way), value in sorted(results.items()):
        print(f"{width:7}  {ranks} x {way:8} {value if isinstance(value, str) else format(value, '12.0f')}")


if __name__ == "__main__":
    main()
