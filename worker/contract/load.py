"""Text to :class:`~worker.contract.spec.JobSpec`, or to the list of all that is wrong with it."""

from __future__ import annotations

import difflib
import json
import math
import re
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from worker.contract.errors import FieldError, SpecInvalid
from worker.contract.spec import JobSpec

__all__ = ["MAX_SPEC_BYTES", "load_spec", "parse_document", "validate_spec"]

MAX_SPEC_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are those of JSON too: ``1e400`` is a number (and refused), not a string."""


_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:timestamp"]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (str, int, float, bool)) and key in seen:
            raise yaml.MarkedYAMLError(problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark)
        if isinstance(key, (str, int, float, bool)):
            seen.add(key)
    loader.flatten_mapping(node)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} stands twice")
        result[key] = value
    return result


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)


def parse_document(text: str | bytes, *, what: str = "spec") -> dict[str, Any]:
    """Parse YAML or JSON text to a mapping.

    Raises:
        SpecInvalid: too long, not UTF-8, neither YAML nor JSON, a repeated key, or not a mapping.
    """
    raw = text.encode() if isinstance(text, str) else text
    if len(raw) > MAX_SPEC_BYTES:
        raise _document_error(what, f"is {len(raw)} bytes long, more than the {MAX_SPEC_BYTES} allowed")
    try:
        decoded = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _document_error(what, f"is not UTF-8 (byte {error.start})") from None
    try:
        document = (
            json.loads(decoded, object_pairs_hook=_unique_pairs)
            if decoded.lstrip().startswith("{")
            else yaml.load(decoded, Loader=_Loader)  # a SafeLoader subclass
        )
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _document_error(what, f"is neither YAML nor JSON: {error}") from None
    if not isinstance(document, dict):
        raise _document_error(what, f"must be a mapping, found {type(document).__name__}")
    return document


def validate_spec(document: dict[str, Any]) -> JobSpec:
    """Return the spec that ``document`` describes.

    Raises:
        SpecInvalid: with one :class:`FieldError` for each mistake, all at once.
    """
    errors = list(_non_finite(document, ""))
    spec: JobSpec | None = None
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        known = {entry.pointer for entry in errors}
        errors += [entry for entry in map(_from_pydantic, error.errors()) if entry.pointer not in known]
    if spec is not None and not errors:
        errors += _cross_field(spec)
    if errors or spec is None:
        raise SpecInvalid(errors)
    return spec


def load_spec(text: str | bytes) -> JobSpec:
    """:func:`parse_document`, then :func:`validate_spec`."""
    return validate_spec(parse_document(text))


def _document_error(what: str, problem: str) -> SpecInvalid:
    return SpecInvalid([FieldError(pointer="", code="unreadable", message=f"the {what} {problem}")])


def _non_finite(value: Any, pointer: str) -> list[FieldError]:
    """Find NaN and infinity anywhere, in free-form sections too."""
    if isinstance(value, dict):
        return [e for key, item in value.items() for e in _non_finite(item, f"{pointer}/{_escape(key)}")]
    if isinstance(value, list):
        return [e for index, item in enumerate(value) for e in _non_finite(item, f"{pointer}/{index}")]
    if isinstance(value, float) and not math.isfinite(value):
        return [
            FieldError(
                pointer=pointer,
                code="not_finite",
                message=f"found {value}, expected a finite number",
                suggestion="Write a number below 1.8e308, or leave the field out for its default.",
            )
        ]
    return []


def _escape(part: object) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")


def _from_pydantic(entry: Any) -> FieldError:
    kind, found = entry["type"], entry.get("input")
    parts = [part for part in entry["loc"] if not (isinstance(part, str) and _is_union_tag(part))]
    pointer = "".join(f"/{_escape(part)}" for part in parts)
    if kind == "extra_forbidden":
        return _unknown_field(pointer, parts)
    if kind == "missing":
        return FieldError(pointer=pointer, code="missing", message="required, but absent")
    shown = repr(found)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    message = entry["msg"].removeprefix("Value error, ")
    codes = {"literal_error": "unknown_value", "enum": "unknown_value", "value_error": "inconsistent"}
    return FieldError(pointer=pointer, code=codes.get(kind, kind), message=f"found {shown}: {message}")


def _is_union_tag(part: str) -> bool:
    return part.startswith(("literal[", "tuple[", "constrained-", "lax-or-strict"))


def _unknown_field(pointer: str, parts: list[int | str]) -> FieldError:
    names = sorted(_fields_at(parts[:-1]))
    close = difflib.get_close_matches(str(parts[-1]), names, n=1)
    return FieldError(
        pointer=pointer,
        code="unknown_field",
        message=f"there is no field {str(parts[-1])!r} here; the fields are {', '.join(names)}",
        suggestion=f"Did you mean {close[0]!r}?" if close else "Remove it.",
    )


def _fields_at(parts: list[int | str]) -> set[str]:
    """Names of the fields of the section at ``parts``; empty where the place is no section."""
    section: Any = JobSpec
    for part in parts:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part) if _is_section(section) else None
        section = None if field is None else _section_of(field.annotation)
    return set(section.model_fields) if _is_section(section) else set()


def _is_section(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def _section_of(annotation: Any) -> Any:
    if _is_section(annotation):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        found = _section_of(part)
        if found is not None:
            return found
    return None


def _cross_field(spec: JobSpec) -> list[FieldError]:
    """Rules that tie two sections together."""
    errors, world, training = [], spec.world_size, spec.training
    if training.global_batch % world:
        below = training.global_batch - training.global_batch % world
        near = [str(n) for n in (below, below + world) if n > 0]
        errors.append(
            FieldError(
                pointer="/training/global_batch",
                code="inconsistent",
                message=f"found {training.global_batch}, which {world} workers cannot share evenly",
                suggestion=f"Use {' or '.join(near)}, or change /mesh.",
            )
        )
    elif training.micro_batch is not None and (training.global_batch // world) % training.micro_batch:
        errors.append(
            FieldError(
                pointer="/training/micro_batch",
                code="inconsistent",
                message=f"found {training.micro_batch}, which does not divide the {training.global_batch // world} "
                "sequences of a worker's step",
                suggestion=f"Use a divisor of {training.global_batch // world}.",
            )
        )
    if training.schedule.warmup_steps > training.steps:
        errors.append(
            FieldError(
                pointer="/training/schedule/warmup_steps",
                code="inconsistent",
                message=f"found {training.schedule.warmup_steps}, more than the {training.steps} steps of the job",
                suggestion="Use fewer warm-up steps.",
            )
        )
    return errors
