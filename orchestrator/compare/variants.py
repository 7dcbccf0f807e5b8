"""What is compared: specs from files, or one base spec with named changes; and whether they see the same data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ComparisonInvalid
from worker.contract.errors import ContractError, FieldError
from worker.contract.load import parse_document, validate_spec
from worker.contract.spec import JobSpec

__all__ = ["Variant", "different_data", "merge_patch", "read_variants"]

_KEYS = {"base", "variants"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a comparison."""

    name: str
    spec: JobSpec


def merge_patch(document: Any, patch: Any) -> Any:
    """Return ``document`` changed by ``patch`` (RFC 7396): mappings merge, null removes, all else replaces."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(document) if isinstance(document, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def read_variants(files: Sequence[Path]) -> list[Variant]:
    """Read job specs, each a variant of the job's name, and comparisons: ``base`` (a spec, or the path of one beside
    the file) and ``variants`` (name to merge patch).

    Raises:
        ComparisonInvalid: with everything that is wrong with any of them, the same name twice, or fewer than two.
        OSError: a file cannot be read.
    """
    mistakes: list[FieldError] = []
    found: list[Variant] = []
    for path in files:
        try:
            found += _read(path, mistakes)
        except ContractError as error:
            mistakes += [_of(f"{path}", entry) for entry in error.errors]
    names = [variant.name for variant in found]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        cure = "Give the jobs different names, or list them as variants of one file."
        mistakes.append(
            FieldError(pointer="", code="repeated", message=f"two runs are called {name!r}", suggestion=cure)
        )
    if len(found) < 2 and not mistakes:
        message = f"found {len(found)} run, and one alone compares with nothing; name more specs, or add variants"
        mistakes.append(FieldError(pointer="", code="too_few", message=message))
    if mistakes:
        raise ComparisonInvalid("nothing was run", mistakes)
    return found


def _of(where: str, entry: FieldError) -> FieldError:
    return entry.model_copy(update={"message": f"{where}: {entry.message}"})


def _read(path: Path, mistakes: list[FieldError]) -> list[Variant]:
    document = parse_document(path.read_bytes())
    if "variants" not in document:
        spec = validate_spec(document)
        return [Variant(spec.name, spec)]
    unknown = sorted(document.keys() - _KEYS)
    mistakes += [
        FieldError(pointer=f"/{key}", code="unknown_field", message=f"{path}: a comparison has base and variants")
        for key in unknown
    ]
    base, patches = document.get("base"), document["variants"]
    if isinstance(base, str):
        base = parse_document((path.parent / base).read_bytes())
    if not isinstance(base, dict) or not isinstance(patches, dict):
        message = f"{path}: base must be a job spec or the path of one, and variants a mapping of names to changes"
        mistakes.append(FieldError(pointer="/base", code="inconsistent", message=message))
        return []
    found: list[Variant] = []
    for name, patch in patches.items():
        try:
            found.append(Variant(str(name), _variant(base, str(name), patch)))
        except ContractError as error:
            mistakes += [_of(f"{path}, variant {name!r}", entry) for entry in error.errors]
    return found


def _variant(base: dict[str, Any], name: str, patch: object) -> JobSpec:
    """Return the merged spec, called after base and variant unless the patch names it: runs must not share state."""
    merged = merge_patch(base, {} if patch is None else patch)
    own_name = isinstance(patch, dict) and "name" in patch
    if isinstance(merged, dict) and isinstance(merged.get("name"), str) and not own_name:
        suffix = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        merged["name"] = f"{merged['name']}-{suffix}"[:63].rstrip("-")
    return validate_spec(merged)


def different_data(variants: Sequence[Variant]) -> list[FieldError]:
    """Return one entry for each setting of data, seed and batch in which the variants differ."""
    found: list[FieldError] = []
    seen = [_data_of(variant.spec) for variant in variants]
    for pointer in seen[0]:
        values = {variant.name: settings[pointer] for variant, settings in zip(variants, seen, strict=True)}
        if len(set(map(repr, values.values()))) > 1:
            told = ", ".join(f"{value!r} in {name}" for name, value in values.items())
            found.append(FieldError(pointer=pointer, code="not_comparable", message=f"found {told}"))
    return found


def _data_of(spec: JobSpec) -> dict[str, object]:
    settings: dict[str, object] = {f"/data/{name}": value for name, value in spec.data.model_dump(mode="json").items()}
    settings["/training/seed"] = spec.training.seed
    settings["/training/global_batch"] = spec.training.global_batch
    return settings
