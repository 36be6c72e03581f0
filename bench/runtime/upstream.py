"""The calls of bench_dispatch on PyTorch's own DTensor, one rank over Gloo: python3 bench/runtime/upstream.py"""
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor


def once(calls, call):
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e9


def compare(name, calls, plain, ours):
    plain(), ours()
    best = [min(once(calls, call) for _ in range(5)) for call in (plain, ours)]
    print(f"{name:22} plain {best[0]:10.0f} ns   distributed {best[1]:10.0f} ns   "
          f"over it {best[1] - best[0]:8.0f} ns   {best[1] / best[0]:.2f}x", flush=True)


def mlp():
    layers = []
    for _ in range(8):
        layers += [torch.nn.Linear(64, 64), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def step(net, optimizer, x):
    optimizer.zero_grad()
    net(x).pow(2).mean().backward()
    optimizer.step()


def on_gpu():
    mesh = init_device_mesh("cuda", (1,))

    def blocks():
        layers = []
        for _ in range(24):
            layers += [torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 1024), torch.nn.GELU()]
        return torch.nn.Sequential(*layers).cuda()

    def timed(net, optimizer, x):
        step(net, optimizer, x)
        torch.cuda.synchronize()

    plain, ours = blocks(), distribute_module(blocks(), mesh)
    plain_steps = torch.optim.AdamW(plain.parameters(), foreach=False)
    our_steps = torch.optim.AdamW(ours.parameters(), foreach=False)
    x = torch.randn(2048, 1024, device="cuda")
    dx = distribute_tensor(x, mesh, [Shard(0)])
    compare("24 blocks, one GPU", 20, lambda: timed(plain, plain_steps, x), lambda: timed(ours, our_steps, dx))


def main():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    torch.set_num_threads(1)
    print("PyTorch", torch.__version__)
    mesh = init_device_mesh("cpu", (1,))
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    da, dc = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(0)])
    db = distribute_tensor(b, mesh, [Replicate()])
    with torch.no_grad():
        compare("add 8x8", 2000, lambda: a + b, lambda: da + dc)
        compare("mm 8x8", 2000, lambda: a @ b, lambda: da @ db)
        compare("t 8x8", 2000, lambda: a.t(), lambda: da.t())
        compare("add_ 8x8", 2000, lambda: a.add_(b), lambda: da.add_(dc))
        compare("view 8x8", 2000, lambda: a.view(4, 2, 8), lambda: da.view(4, 2, 8))
        compare("sum 8x8", 2000, lambda: a.sum(), lambda: da.sum())
        compare("from_local", 2000, lambda: None, lambda: DTensor.from_local(a, mesh, [Shard(0)]))
        compare("to_local", 2000, lambda: None, lambda: da.to_local())
    plain, ours = mlp(), distribute_module(mlp(), mesh)
    plain_steps = torch.optim.AdamW(plain.parameters(), foreach=False)
    our_steps = torch.optim.AdamW(ours.parameters(), foreach=False)
    x = torch.randn(32, 64)
    dx = distribute_tensor(x, mesh, [Shard(0)])
    compare("MLP training step", 20, lambda: step(plain, plain_steps, x), lambda: step(ours, our_steps, dx))
    if torch.cuda.is_available():
        on_gpu()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
