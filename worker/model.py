"""The model of a job: built by transformers, initialised the same on every rank."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from torch import nn

from worker.contract.errors import FieldError, PlanRefused
from worker.contract.spec import JobSpec, ModelSpec

__all__ = ["build_model", "freeze_excluded"]

_FOLDED_KEYS = frozenset({"rope_theta", "rope_scaling", "torch_dtype", "attn_implementation"})
"""Configuration keys that transformers accepts and folds into others."""


def build_model(spec: JobSpec, vocab_size: int, *, meta: bool = False) -> nn.Module:
    """Return the model in float32 on the CPU, or its shapes on the meta device.

    Initial weights depend on ``training.seed`` alone; the global random state is left as it was.

    Args:
        vocab_size: of the tokenizer; taken where the configuration names none.

    Raises:
        PlanRefused: an unknown type, a configuration that transformers refuses, or one that does not fit the data.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    config = _config(spec.model, vocab_size)
    _check_fit(spec, config, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.training.seed)
        model: nn.Module = _instantiate(spec.model, config, meta)
    config.use_cache = False
    if spec.model.activation_checkpointing:
        _enable_checkpointing(model)
    freeze_excluded(model, spec.routing.exclude)
    _check_trainable(model, spec.routing.exclude)
    model.train()
    return model


def freeze_excluded(model: nn.Module, tokens: tuple[str, ...]) -> None:
    """Freeze every parameter whose full name contains one of ``tokens``."""
    for name, parameter in model.named_parameters():
        if any(token in name for token in tokens):
            parameter.requires_grad_(False)


def _check_trainable(model: nn.Module, exclude: tuple[str, ...]) -> None:
    parameters = list(model.parameters())
    if exclude and not any(parameter.requires_grad for parameter in parameters):
        message = f"found {list(exclude)}, which excludes all {len(parameters)} parameters: nothing is left to train"
        raise _refused("/routing/exclude", "nothing_matched", message, "Remove a token, or make it longer.")


def _refused(pointer: str, code: str, message: str, suggestion: str | None = None) -> PlanRefused:
    return PlanRefused([FieldError(pointer=pointer, code=code, message=message, suggestion=suggestion)])


def _config(model: ModelSpec, vocab_size: int) -> Any:
    from transformers import AutoConfig

    if model.path is not None:
        if not os.path.isdir(model.path):  # transformers would take it for a name on the hub
            raise _refused("/model/path", "bad_model_path", f"no such directory: {model.path}")
        try:
            return AutoConfig.from_pretrained(model.path, local_files_only=True)
        except Exception as error:  # transformers raises whatever its parsers raise
            message = f"transformers cannot read a model from {model.path!r}: {_short(error)}"
            raise _refused("/model/path", "bad_model_path", message) from error
    assert model.type is not None, "the spec was not validated"
    _check_config_names(model)
    try:
        return AutoConfig.for_model(model.type, **{"vocab_size": vocab_size, **model.config})
    except Exception as error:  # as above
        message = f"transformers refuses this configuration: {_short(error)}"
        raise _refused("/model/config", "bad_config", message) from error


def _check_config_names(model: ModelSpec) -> None:
    """Refuse what transformers would silently keep as an attribute that nothing reads."""
    import difflib

    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert model.type is not None, "the spec was not validated"
    if model.type not in CONFIG_MAPPING or model.type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        close = difflib.get_close_matches(model.type, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), n=3)
        cure = f"Did you mean {' or '.join(map(repr, close))}?" if close else None
        message = f"found {model.type!r}, which is no causal language model of the installed transformers"
        raise _refused("/model/type", "unknown_model_type", message, cure)
    kind = CONFIG_MAPPING[model.type]
    known = {*inspect.signature(kind.__init__).parameters, *kind.attribute_map, *_FOLDED_KEYS} - {"self", "kwargs"}
    unknown = sorted(set(model.config) - known)
    if unknown:
        raise PlanRefused([_unknown_key(name, kind.__name__, known) for name in unknown])


def _unknown_key(name: str, kind: str, known: set[str]) -> FieldError:
    import difflib

    close = difflib.get_close_matches(name, sorted(known), n=1)
    return FieldError(
        pointer="/model/config/" + name.replace("~", "~0").replace("/", "~1"),
        code="unknown_field",
        message=f"{kind} has no parameter {name!r}",
        suggestion=f"Did you mean {close[0]!r}?" if close else "Remove it.",
    )


def _check_fit(spec: JobSpec, config: Any, vocab_size: int) -> None:
    errors = []
    found = getattr(config, "vocab_size", None)
    if isinstance(found, int) and found < vocab_size:
        errors.append(
            FieldError(
                pointer="/model/config/vocab_size" if spec.model.path is None else "/model/path",
                code="vocabulary_too_small",
                message=f"the model has {found} tokens, the tokenizer {spec.data.tokenizer!r} has {vocab_size}",
                suggestion=f"Use {vocab_size} or more, or leave it out.",
            )
        )
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < spec.data.sequence_length:
        errors.append(
            FieldError(
                pointer="/data/sequence_length",
                code="sequence_too_long",
                message=f"found {spec.data.sequence_length}, but the model has {longest} positions",
                suggestion="Raise /model/config/max_position_embeddings, or shorten the sequences.",
            )
        )
    if errors:
        raise PlanRefused(errors)


def _instantiate(model: ModelSpec, config: Any, meta: bool) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        if meta:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if model.path is not None:
            return AutoModelForCausalLM.from_pretrained(model.path, local_files_only=True, dtype=torch.float32)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # as in _config
        pointer = "/model/config" if model.path is None else "/model/path"
        raise _refused(pointer, "bad_config", f"transformers cannot build the model: {_short(error)}") from error


def _enable_checkpointing(model: Any) -> None:
    if not model.supports_gradient_checkpointing:
        message = f"{type(model).__name__} does not support it"
        raise _refused("/model/activation_checkpointing", "unsupported", message, "Set it to false.")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _short(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 400 else text[:400] + "..."
