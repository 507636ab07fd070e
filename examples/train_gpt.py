"""Train a small GPT on the source of Python's standard library, on any number of ranks, and never lose it.

    torchrun --nproc-per-node 4 examples/train_gpt.py --tp 2 --steps 60 --save-every 10 --url /tmp/gpt

Kill it however you like and run the same line again: it goes on where it was, and every loss is bit-identical to those
of a run that was never killed. FSDP2 shards over the data-parallel ranks, DTensor over the tensor-parallel ones, on
CPUs (gloo) and GPUs (NCCL) alike. The lines that concern checkpoints are marked  # <--
"""

import argparse
import json
import os
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptstore import CheckpointStore, PerRank, SaveHandle

VOCAB = 256  # a token is a byte


class Block(nn.Module):
    """Pre-norm attention and MLP; without biases and norm gains, as in OLMo, so that tp shards every parameter."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.dropout = dim // heads, dropout
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """From and to [batch, time, dim]. Under tensor parallelism each rank has some of the heads."""
        h = F.layer_norm(x, x.shape[-1:])
        q, k, v = (f(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + F.dropout(self.out(h), self.dropout, self.training)
        h = F.gelu(self.up(F.layer_norm(x, x.shape[-1:])))
        return x + F.dropout(self.down(h), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, dim: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, a scalar, of predicting targets from tokens; both int64 [batch, time]."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(F.layer_norm(x, x.shape[-1:]))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """In place: tensor parallelism inside each block over mesh["tp"], then FSDP over mesh["dp"]."""
    column, row = ColwiseParallel(), RowwiseParallel()
    plan = {"token": RowwiseParallel(input_layouts=Replicate()), "position": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
            "blocks.*.out": row, "blocks.*.down": row, "blocks.*.up": column,
            "blocks.*.q": column, "blocks.*.k": column, "blocks.*.v": column}  # fmt: skip
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def read_corpus() -> np.ndarray:
    """The text: bytes [n] of the standard library's modules, in the order of their names."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(module.read_bytes() for module in modules), np.uint8)


def draw_batch(corpus: np.ndarray, key: tuple[int, ...], size: int, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [size, context]: a pure function of the key, so that no state of it needs saving."""
    starts = np.random.default_rng(key).integers(len(corpus) - context, size=size)
    rows = torch.from_numpy(corpus[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="where checkpoints go; CKPTSTORE_URL if not given")
    parser.add_argument("--log-file", type=Path, help="append a JSON line per step to this file")
    for name, default in {"tp": 1, "steps": 60, "save-every": 10, "batch": 4, "seed": 0,
                          "layers": 4, "dim": 256, "heads": 8, "context": 128}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def train(args: argparse.Namespace, device: torch.device, store: CheckpointStore) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    rank, dp_rank = dist.get_rank(), mesh["dp"].get_local_rank()
    rng = torch.cuda if device.type == "cuda" else torch

    torch.manual_seed(args.seed)  # the same on all ranks: tensor parallelism slices one initial model
    model = GPT(args.dim, args.layers, args.heads, args.context, args.dropout).to(device)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    torch.manual_seed(args.seed + 1 + dp_rank)  # dropout: alike within a tensor-parallel group, different between them
    corpus = read_corpus()

    def tell(text: str, **line: object) -> None:
        """By rank 0: a text for people, and a line of JSON for programs."""
        if rank == 0:
            print(text, flush=True)
            if args.log_file:
                with args.log_file.open("a") as file:
                    print(json.dumps(line), file=file)

    dropout_rng = rng.get_rng_state()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": PerRank(dropout_rng)}  # <--
    report = store.load(state)  # <-- in place; an empty store leaves everything as it is and gives step None
    rng.set_rng_state(dropout_rng)
    if report.step is not None:
        tell(f"resumed at step {report.step}", resumed=report.step, load_seconds=report.seconds)

    saves: list[SaveHandle] = []
    for step in range((report.step or 0) + 1, args.steps + 1):
        began = time.perf_counter()
        inputs, targets = draw_batch(corpus, (args.seed, step, dp_rank), args.batch, args.context)
        loss = model(inputs.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh["dp"].size()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        seconds = time.perf_counter() - began

        preempted = store.preempted(step)  # <-- has any rank got SIGTERM? The same answer on all of them
        stall = 0.0
        if step % args.save_every == 0 or step == args.steps or preempted:
            dropout_rng.copy_(rng.get_rng_state())
            began = time.perf_counter()
            saves.append(store.save(step, state))  # <-- returns at once; the upload goes on while we train
            stall = time.perf_counter() - began
        text = f"step {step:4}  loss {mean:.4f}  {seconds * 1e3:4.0f} ms  stall {stall * 1e3:.1f} ms"
        tell(text, step=step, loss=mean.item().hex(), seconds=seconds, stall=stall)
        if preempted:
            break

    for handle in saves:
        handle.wait()  # <-- returns once the save is durable, else raises what went wrong
        tell(f"step {handle.step} is durable", saved=handle.step, **asdict(handle.stats))


def main() -> None:
    args = parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with CheckpointStore(args.url) as store:  # <--
        train(args, device, store)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
