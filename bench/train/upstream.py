"""The transformer of bench_train on PyTorch's own DTensor and FSDP2, two processes over Gloo, in turns with bench_train:
upstream.py --one WAY WIDTH trains three steps for every line of its input and says what one of the last two took."""
import os
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCABULARY, CONTEXT, HEADS, LAYERS, BATCH, STEPS_OF_A_TURN = 95, 64, 4, 2, 32, 3


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


def train(way, width, ranks):
    torch.manual_seed(1)
    model = Gpt(width)
    mesh = init_device_mesh("cpu", (ranks,))
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
    step = 0
    while True:
        if step % STEPS_OF_A_TURN == 1:
            start = time.perf_counter()
        optimizer.zero_grad()
        logits = model(text)
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), text.reshape(-1))
        loss.backward()
        optimizer.step()
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
        step += 1
        if step % STEPS_OF_A_TURN == 0:
            after_turn((time.perf_counter() - start) / (STEPS_OF_A_TURN - 1))


def after_turn(seconds):
    """Both ranks wait here until the first has been given another turn."""
    go = torch.zeros(1)
    if dist.get_rank() == 0:
        print(f"{seconds:.9f}", flush=True)
        go += sys.stdin.readline() != ""
    dist.broadcast(go, 0)
    if go.item() == 0:
        os._exit(0)


def main():
    if len(sys.argv) != 4 or sys.argv[1] != "--one":
        sys.exit(__doc__)
    ranks = 2
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE=str(ranks))
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"}, stdin=subprocess.DEVNULL)
    torch.set_num_threads(max(1, os.cpu_count() // ranks))
    dist.init_process_group("gloo")
    train(sys.argv[2], int(sys.argv[3]), ranks)


if __name__ == "__main__":
    main()
