"""The runtime in a training loop of one's own: no service, no Ray, one torch.distributed group.

    python -m torch.distributed.run --nproc-per-node 2 examples/own_loop.py [--steps 60]

A small Llama learns the bytes of a module of Python's standard library, on CPUs (gloo) or GPUs (NCCL). What is
particular to the runtime are the four calls marked below; the rest is any training loop. At the end it prints what was
planned and what was counted, and shows that a saved state goes on as if nothing had happened.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import dmuon_runtime as dmuon

SEQUENCE, BATCH = 128, 6
POLICY = {
    "defaults": {"route": "muon"},
    "overrides": [
        {"name": ["norm"], "set": {"route": "adamw"}},
        {"name": ["embed_tokens", "lm_head"], "set": {"route": "sharded_adamw"}},
    ],
}


def build(device: torch.device) -> tuple[nn.Module, dmuon.Muon]:
    """Return a model whose weights the ranks share, and its optimizer."""
    torch.manual_seed(0)  # all ranks begin with the same weights
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    dmuon.dedicate_params(model, mesh, lambda name, p: p.requires_grad, param_policy=POLICY)  # 1: who owns what
    return model, dmuon.Muon(model, lr=0.02, adamw_lr=3e-3)  # 2: one optimizer for all routes


def train_step(model: nn.Module, optimizer: dmuon.Muon, tokens: Tensor) -> float:
    """Return this rank's loss."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    dmuon.clip_grad_norm_(optimizer, 1.0)  # 3: the norm over all ranks
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def batch(text: Tensor, step: int, device: torch.device) -> Tensor:
    """Return this rank's int64 [BATCH, SEQUENCE] of a step."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(0, text.numel() - SEQUENCE, (BATCH,), generator=generator).tolist()
    return torch.stack([text[start : start + SEQUENCE] for start in starts]).long().to(device)


def report(model: nn.Module) -> None:
    """Print the plan's load and what the ledger of this rank counted."""
    plan = dmuon.summarize_comm_plan(model)
    counted = dmuon.get_counters(model).snapshot()
    print(plan)
    for (route, phase), total in sorted(counted.comm.items()):
        hidden = 1 - total.exposed_seconds / total.seconds if total.seconds else 1.0
        size = f"{total.payload_bytes / 2**20:.1f} MiB"
        print(f"{route:>14} {phase:<9} {total.collectives:>5} collectives {size:>10} {hidden:6.1%} hidden")
    print(f"Newton-Schulz: {counted.ns_planned_matrices} matrices of this rank, on {dmuon.get_ns_backend()}")


def main() -> None:
    """Train, report, save, load into a second model and compare one more step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps must be at least 1, found {steps}")
    if "RANK" not in os.environ:
        parser.error("start it as python -m torch.distributed.run --nproc-per-node 2 examples/own_loop.py")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    text = torch.frombuffer(
        bytearray(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()), dtype=torch.uint8
    )
    is_first = dist.get_rank() == 0

    model, optimizer = build(device)
    for step in range(steps):
        loss = train_step(model, optimizer, batch(text, step, device))
        if is_first and step % 10 == 0:
            print(f"step {step:>4}  loss {loss:.3f}")
    if is_first:
        report(model)

    state = dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)  # 4: whole, by name
    again, its_optimizer = build(device)
    dmuon.set_model_state_dict(again, state[0])
    dmuon.set_optimizer_state_dict(again, its_optimizer, state[1])
    losses = [
        [train_step(m, o, batch(text, steps + n, device)) for n in range(3)]
        for m, o in ((model, optimizer), (again, its_optimizer))
    ]
    if is_first:
        print("from the saved state:", "the same losses" if losses[0] == losses[1] else f"other losses: {losses}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
