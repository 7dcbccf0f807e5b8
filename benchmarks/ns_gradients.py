"""How accurate Newton-Schulz is on gradients: of a Llama in its first steps on text, against the polynomial in fp64.

    python -m benchmarks.ns_gradients [--hidden 1024] [--steps 12]

The text is this repository's documentation, byte by byte. Every weight matrix of the layers is orthogonalised by each
restart, as a user would on a CUDA device, in float16 emulated as in :mod:`benchmarks.ns_accuracy` on a CPU. Of each
step the worst over the matrices is printed: the relative Frobenius error, and that of the direction of the largest
singular value, relative to its own length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dmuon_runtime as dmuon
from benchmarks.common import expect_positive, print_table, write_result
from benchmarks.ns_accuracy import Emulated, Known, emulated, on_device
from benchmarks.workloads import Workload

__all__ = ["first_gradients", "main", "run"]

FORMS: dict[str, tuple[int, ...] | None] = {"direct": None, "gram [2]": (2,), "gram [3]": (3,), "gram [2, 4]": (2, 4)}
LOOKED_AT = (1, 2, 4, 12)
"""Steps, counted from 1."""
COEFFICIENTS = dmuon.POLAR_EXPRESS_COEFFICIENTS
BATCH, SEQUENCE = 16, 512


def text(device: torch.device) -> Tensor:
    """Return bytes of the documentation, int64 [BATCH, SEQUENCE]."""
    pages = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    data = b"".join(page.read_bytes() for page in pages)[: BATCH * SEQUENCE]
    return torch.tensor(list(data)).view(BATCH, SEQUENCE).to(device)


def first_gradients(hidden: int, steps: int, device: torch.device) -> Iterator[tuple[int, float, dict[str, Tensor]]]:
    """Train with AdamW; yield step, loss and gradients [n, m] with n at most m, of the steps that are looked at."""
    model = Workload(hidden, 4 * hidden, 2, 8, 8, 256, BATCH, SEQUENCE).build(device)
    optimizer, tokens = torch.optim.AdamW(model.parameters(), 1e-3), text(device)
    for step in range(1, steps + 1):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if step in LOOKED_AT:
            yield step, float(loss.detach()), _matrices(model)
        optimizer.step()
        optimizer.zero_grad()


def _matrices(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if "layers." in name and parameter.ndim == 2 and gradient is not None:
            rows, columns = gradient.shape
            found[name] = (gradient if rows <= columns else gradient.mT).contiguous()
    return found


def known(gradient: Tensor) -> Known:
    """Take a gradient [n, m] apart, on the CPU in fp64."""
    left, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    values = values / torch.linalg.vector_norm(values)
    return Known(gradient.cpu(), left.cpu(), values.cpu(), right.mT.cpu())


def run(hidden: int, steps: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each step and form."""
    rows = []
    orthogonalize = on_device if device.type == "cuda" else partial(emulated, kernel=Emulated(torch.float16))
    for step, loss, gradients in first_gradients(hidden, steps, device):
        worst = {name: {"error": 0.0, "direction error": 0.0} for name in FORMS}
        for gradient in gradients.values():
            matrix = known(gradient)
            exact = matrix.exact(COEFFICIENTS)
            main_direction = matrix.right[:, 0]
            for name, restarts in FORMS.items():
                off = orthogonalize(matrix, COEFFICIENTS, restarts).double() - exact
                found = {
                    "error": float(off.norm() / exact.norm()),
                    "direction error": float((off @ main_direction).norm() / (exact @ main_direction).norm()),
                }
                worst[name] = {key: max(value, found[key]) for key, value in worst[name].items()}
        rows += [{"hidden": hidden, "step": step, "loss": loss, "form": name} | worst[name] for name in FORMS]
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run, print, write; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.ns_gradients")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=max(LOOKED_AT))
    options = parser.parse_args(arguments)
    expect_positive(parser, options, "hidden", "steps")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = run(options.hidden, options.steps, device)
    print_table(list(rows[0]), [[f"{v:.2g}" if isinstance(v, float) else v for v in row.values()] for row in rows])
    write_result(f"ns_gradients-{options.hidden}", rows, coefficients=COEFFICIENTS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
