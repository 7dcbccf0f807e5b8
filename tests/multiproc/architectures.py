"""Real architectures in miniature, each with the policy that we would give to the large one.

    python -m tests.multiproc.architectures

writes the routing tables under tests/dmuon_runtime/routing_tables anew; read the difference before you commit it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as hf
from torch import Tensor, nn

import dmuon_runtime as dmuon

__all__ = ["ARCHITECTURES", "TABLES", "Architecture", "make_boundary", "routing_table"]

TABLES = Path(__file__).parent.parent / "dmuon_runtime" / "routing_tables"
VOCABULARY, HIDDEN, INNER = 19, 16, 24
Inputs = Callable[[torch.Generator], dict[str, Tensor]]


def _ids(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _images(generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (2,), generator=generator)}


def _set(names: list[str], **changes: object) -> dict[str, object]:
    return {"name": names, "set": changes}


@dataclass(frozen=True)
class Architecture:
    """How to build a model, what to feed it, where its boundaries are and how its parameters are routed."""

    model: str
    """Class name in transformers."""
    config: hf.PretrainedConfig
    overrides: tuple[dict[str, object], ...]
    blocks: tuple[str, ...] = ()
    """Class names of boundary modules; none: the default boundaries."""
    inputs: Inputs = _ids

    def build(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """Return the model with fixed weights, none of them zero, without dropout."""
        torch.manual_seed(0)
        model: nn.Module = getattr(hf, self.model)(self.config)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        return model.to(dtype)

    def policy(self) -> dict[str, object]:
        """Return its ``param_policy``, in double precision for comparison."""
        return {"defaults": {"master_dtype": "fp64", "optim_dtype": "fp64"}, "overrides": list(self.overrides)}

    def backward(self, model: nn.Module, step: int, rank: int) -> None:
        """Do one forward and backward on the batch of ``step`` and ``rank``."""
        model(**self.inputs(torch.Generator().manual_seed(1000 * step + rank))).loss.backward()

    def boundary(self, model: nn.Module) -> Callable[[nn.Module], bool] | None:
        """Return the ``hook_boundary_predicate`` for ``model``."""
        return make_boundary(model, self.blocks) if self.blocks else None


def make_boundary(model: nn.Module, blocks: tuple[str, ...]) -> Callable[[nn.Module], bool]:
    """Return a predicate for modules of the classes ``blocks``, and outside of them for any that holds a parameter."""
    inside = {
        id(child)
        for block in model.modules()
        if type(block).__name__ in blocks
        for child in block.modules()
        if child is not block
    }

    def predicate(module: nn.Module) -> bool:
        is_block = type(module).__name__ in blocks
        return is_block or (id(module) not in inside and bool(list(module.parameters(recurse=False))))

    return predicate


_DECODER: dict[str, object] = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_TABLES = _set(["embed_tokens", "lm_head"], route="sharded_adamw")
_NORMS = _set(["norm"], route="adamw")
_ENCODER: dict[str, object] = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 2
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", hf.LlamaConfig(**_DECODER), (_TABLES, _NORMS)),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", hf.Qwen3Config(**_DECODER, tie_word_embeddings=True), (_TABLES, _NORMS)
    ),
    "gemma": Architecture("GemmaForCausalLM", hf.GemmaConfig(**_DECODER), (_TABLES, _NORMS)),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        hf.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"),
        (
            _TABLES,
            _set(["norm", "mlp.gate.weight"], route="adamw"),
            _set(["gate_up_proj"], matrix_view="experts", split_rows=[INNER, INNER]),
            _set(["down_proj"], matrix_view="experts"),
        ),
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        hf.GPT2Config(
            n_embd=HIDDEN, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=32, bos_token_id=1, eos_token_id=2
        ),
        (
            _set(["wte", "wpe"], route="sharded_adamw"),
            _set(["ln_", ".bias"], route="adamw"),
            _set(["c_attn.weight"], matrix_view="transposed", split_rows=[HIDDEN] * 3),
            _set(["c_proj.weight", "c_fc.weight"], matrix_view="transposed"),
        ),
        blocks=("GPT2Block",),
    ),
    "bert": Architecture(
        "BertForMaskedLM",
        hf.BertConfig(**_ENCODER, vocab_size=VOCABULARY, max_position_embeddings=32),
        (_set(["embeddings"], route="sharded_adamw"), _set(["LayerNorm", "bias"], route="adamw")),
        blocks=("BertLayer",),
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        hf.ViTConfig(**_ENCODER, image_size=8, patch_size=4, num_labels=5),
        (
            _set(["norm", "bias", "cls_token", "position_embeddings", "classifier"], route="adamw"),
            _set(["patch_embeddings.projection.weight"], matrix_view="flatten"),
        ),
        inputs=_images,
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        hf.T5Config(
            d_model=HIDDEN, d_kv=8, d_ff=INNER, num_layers=2, num_heads=2, vocab_size=VOCABULARY, pad_token_id=0,
            decoder_start_token_id=0, eos_token_id=1, dropout_rate=0.0,
        ),
        (_set(["shared"], route="sharded_adamw"), _set(["layer_norm", "relative_attention_bias"], route="adamw")),
        blocks=("T5Block",),
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        hf.MambaConfig(
            hidden_size=HIDDEN, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=4, expand=2, conv_kernel=3,
            time_step_rank=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        ),
        (
            _set(["embeddings"], route="sharded_adamw"),
            _set(["norm", "bias", "A_log", ".D", "conv1d"], route="adamw"),
            _set(["in_proj"], split_rows=[2 * HIDDEN, 2 * HIDDEN]),
        ),
    ),
}  # fmt: skip


def routing_table(architecture: Architecture) -> str:
    """Return the table that is reviewed: one line a parameter with its route, the rule that decided and its unit."""
    with torch.device("meta"):
        model: nn.Module = getattr(hf, architecture.model)(architecture.config)
    plan = dmuon.plan_params(
        model,
        2,
        lambda name, parameter: parameter.requires_grad,
        param_policy=architecture.policy(),
        hook_boundary_predicate=architecture.boundary(model),
    )
    lines = [f"warning: {text}" for text in plan.warnings]
    for entry in plan.parameters:
        view = " ".join([entry.matrix_view or "", f"rows {list(entry.split_rows)}" if entry.split_rows else ""]).strip()
        name = " = ".join([entry.name, *entry.aliases])
        shape = "x".join(map(str, entry.shape))
        cells = [name, shape, entry.route, entry.rule, entry.unit or "<root>", *([view] if view else [])]
        lines.append(" | ".join(cells))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLES.mkdir(exist_ok=True)
    for key, found in ARCHITECTURES.items():
        (TABLES / f"{key}.txt").write_text(routing_table(found))
    print(f"written: {', '.join(ARCHITECTURES)}")
