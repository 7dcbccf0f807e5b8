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
from worker.contract.kernels import Algorithm
from worker.contract.spec import OPTIMIZER_TAG, AdamWOptimizer, DmuonOptimizer, JobSpec, MuonOptimizer

__all__ = ["MAX_SPEC_BYTES", "load_spec", "parse_document", "validate_spec"]

MAX_SPEC_BYTES = 1 << 20
MAX_VALUES = 100_000
"""Values of a document, each alias counted as often as it stands."""
MAX_DEPTH = 64
"""Mappings and lists inside each other."""
MAX_ERRORS = 100
"""Mistakes of a kind that one answer names."""
_MERGE = "tag:yaml.org,2002:merge"
_OPTIMIZERS = {"dmuon": DmuonOptimizer, "muon": MuonOptimizer, "adamw": AdamWOptimizer}


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are those of JSON too: ``1e400`` is a number (and refused), not a string."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._flat: set[yaml.MappingNode] = set()
        self._merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put what merge keys bring before the mapping's own keys, none of which may stand twice."""
        if node in self._flat:
            return
        self._flat.add(node)
        own = [entry for entry in node.value if entry[0].tag != _MERGE]
        self._refuse_repeated(own)
        merged: list[Any] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged += self._merged_entries(value_node)
        node.value = merged + own

    def _merged_entries(self, node: yaml.Node) -> list[Any]:
        """Entries of the mapping, or of the mappings of a list, the first of which has the last word."""
        found: list[Any] = []
        for source in reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(source, yaml.MappingNode):
                problem = "a merge key takes a mapping or a list of mappings"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=source.start_mark)
            self.flatten_mapping(source)
            self._merged += len(source.value) + 1
            if self._merged > MAX_VALUES:
                raise yaml.MarkedYAMLError(problem=f"merge keys bring more than {MAX_VALUES} values")
            found += source.value
        return found

    def _refuse_repeated(self, entries: list[Any]) -> None:
        seen: set[Any] = set()
        for key_node, _ in entries:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark)
            seen.add(key)


_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:timestamp"]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} stands twice")
        result[key] = value
    return result


def parse_document(text: str | bytes, *, what: str = "spec") -> dict[str, Any]:
    """Parse YAML or JSON text to a mapping.

    Raises:
        SpecInvalid: too long, empty, not UTF-8, neither YAML nor JSON, a repeated key, or not a mapping.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
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
    if document is None:
        raise _document_error(what, "is empty")
    if not isinstance(document, dict):
        raise _document_error(what, f"must be a mapping, found {type(document).__name__}")
    return document


def validate_spec(document: dict[str, Any]) -> JobSpec:
    """Return the spec that ``document`` describes. Its types are those of JSON: ``true`` and ``"10"`` are no numbers.

    Raises:
        SpecInvalid: with one :class:`FieldError` for each mistake, all at once.
    """
    errors = _scan(document)
    if any(entry.code != "not_finite" for entry in errors):
        raise SpecInvalid(errors)
    spec: JobSpec | None = None
    try:
        spec = JobSpec.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        known = {entry.pointer for entry in errors}
        found = [_from_pydantic(entry, document) for entry in error.errors()[:MAX_ERRORS]]
        errors += [entry for entry in found if entry.pointer not in known]
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


_Path = tuple["_Path", object] | None
"""The way to a value: the way to what holds it, and its key there. A pointer is made of it only for an error."""


def _scan(document: Any) -> list[FieldError]:
    """Find what no section may hold, free-form ones too, and stop before a document that expands without bound.

    Raises:
        SpecInvalid: too many values or characters, or too deep, which ends the search.
    """
    errors: list[FieldError] = []
    values = characters = 0
    waiting: list[tuple[Any, _Path, int]] = [(document, None, 0)]
    while waiting and len(errors) < MAX_ERRORS:
        value, path, depth = waiting.pop()
        if isinstance(value, (dict, list, tuple)):
            values += len(value)
            if values > MAX_VALUES:
                raise _document_error("spec", f"expands to more than {MAX_VALUES} values (aliases repeat them)")
            if depth >= MAX_DEPTH:
                raise SpecInvalid([_at(path, "too_deep", f"more than {MAX_DEPTH} mappings and lists in each other")])
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            if isinstance(value, dict):
                characters += sum(len(key) for key in value if isinstance(key, str))
                errors += [entry for key in value if (entry := _wrong_key(key, (path, key)))]
            waiting += [(item, (path, key), depth + 1) for key, item in reversed(items)]
        else:
            characters += len(value) if isinstance(value, str) else 0
            wrong = _wrong_value(value, path)
            errors += [] if wrong is None else [wrong]
        if characters > MAX_SPEC_BYTES:
            raise _document_error("spec", f"expands to more than {MAX_SPEC_BYTES} characters (aliases repeat them)")
    return errors


def _wrong_key(key: object, path: _Path) -> FieldError | None:
    if not isinstance(key, str):
        return _at(path, "string_type", f"found the key {key!r}, expected text", "Put it in quotes.")
    return None if _is_text(key) else _at(path, "not_text", "the key is no valid Unicode text")


def _wrong_value(value: object, path: _Path) -> FieldError | None:
    if isinstance(value, float) and not math.isfinite(value):
        cure = "Write a number below 1.8e308, or leave the field out for its default."
        return _at(path, "not_finite", f"found {value}, expected a finite number", cure)
    if isinstance(value, int) and value.bit_length() > 64:
        return _at(path, "too_large", f"found an integer of {value.bit_length()} bits, expected at most 64")
    if isinstance(value, str) and not _is_text(value):
        return _at(path, "not_text", f"found {value[:40]!a}, which is no valid Unicode text")
    if value is not None and not isinstance(value, (str, int, float)):
        return _at(path, "not_json", f"found a value of type {type(value).__name__}, which JSON does not know")
    return None


def _is_text(value: str) -> bool:
    """False with half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _at(path: _Path, code: str, message: str, suggestion: str | None = None) -> FieldError:
    parts: list[str] = []
    while path is not None:
        path, key = path
        parts.append(_escape(key))
    pointer = "".join(f"/{part}" for part in reversed(parts))
    return FieldError(pointer=pointer, code=code, message=message, suggestion=suggestion)


def _escape(part: object) -> str:
    text = str(part).encode("utf-8", "backslashreplace").decode()
    return text.replace("~", "~0").replace("/", "~1")


def _way(loc: tuple[int | str, ...], document: Any, kind: str) -> list[int | str]:
    """Return the keys of ``document`` that lead to pydantic's ``loc``, which names members of unions between them."""
    parts: list[int | str] = []
    value = document
    for number, part in enumerate(loc, 1):
        held = dict(enumerate(value)) if isinstance(value, list) else value if isinstance(value, dict) else {}
        if part in held or (kind == "missing" and number == len(loc)):
            parts.append(part)
            value = held.get(part)
    return parts


def _from_pydantic(entry: Any, document: Any) -> FieldError:
    kind, found, loc = entry["type"], entry.get("input"), entry["loc"]
    parts = _way(loc, document, kind)
    optimizer = "dmuon"
    if loc[:1] == ("optimizer",) and len(loc) > 1 and str(loc[1]).startswith(OPTIMIZER_TAG):
        optimizer = str(loc[1]).removeprefix(OPTIMIZER_TAG)
    pointer = "".join(f"/{_escape(part)}" for part in parts)
    if kind == "extra_forbidden":
        return _unknown_field(pointer, parts, optimizer)
    if kind == "missing":
        return FieldError(pointer=pointer, code="missing", message="required, but absent")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_kind(pointer, found)
    message = entry["msg"].removeprefix("Value error, ")
    codes = {"literal_error": "unknown_value", "enum": "unknown_value", "value_error": "inconsistent"}
    return FieldError(pointer=pointer, code=codes.get(kind, kind), message=f"found {_shown(found)}: {message}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown_kind(pointer: str, found: object) -> FieldError:
    if not isinstance(found, dict):
        message = f"found {_shown(found)}, expected a mapping"
        return FieldError(pointer=pointer, code="model_type", message=message)
    message = f"found {_shown(found.get('kind'))}, expected {', '.join(map(repr, _OPTIMIZERS))}"
    close = difflib.get_close_matches(str(found.get("kind")), list(_OPTIMIZERS), n=1)
    cure = f"Did you mean {close[0]!r}?" if close else None
    return FieldError(pointer=f"{pointer}/kind", code="unknown_value", message=message, suggestion=cure)


def _unknown_field(pointer: str, parts: list[int | str], optimizer: str) -> FieldError:
    names = sorted(_fields_at(parts[:-1], optimizer))
    close = difflib.get_close_matches(str(parts[-1]), names, n=1)
    return FieldError(
        pointer=pointer,
        code="unknown_field",
        message=f"there is no field {str(parts[-1])!r} here; the fields are {', '.join(names)}",
        suggestion=f"Did you mean {close[0]!r}?" if close else "Remove it.",
    )


def _fields_at(parts: list[int | str], optimizer: str) -> set[str]:
    """Names of the fields of the section at ``parts``; empty where the place is no section."""
    section: Any = JobSpec
    if parts[:1] == ["optimizer"]:
        section, parts = _OPTIMIZERS[optimizer], parts[1:]
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
    """Rules that tie values together. They are for what is handed in: a stored spec, which an earlier version may have
    accepted, is read without them."""
    errors, training, kernels = _uneven(spec), spec.training, spec.kernels
    if training.schedule.warmup_steps > training.steps:
        message = f"found {training.schedule.warmup_steps}, more than the {training.steps} steps of the job"
        errors.append(_inconsistent("/training/schedule/warmup_steps", message, "Use fewer warm-up steps."))
    if kernels.restarts is not None and kernels.algorithm is Algorithm.DIRECT:
        message = f"found {list(kernels.restarts)} beside algorithm 'direct', which never starts anew"
        cure = "Leave restarts out, or set algorithm to 'gram'."
        errors.append(_inconsistent("/kernels/restarts", message, cure))
    return errors


def _uneven(spec: JobSpec) -> list[FieldError]:
    """Find a batch that workers cannot share."""
    world, training = spec.world_size, spec.training
    if training.global_batch % world:
        below = training.global_batch - training.global_batch % world
        near = " or ".join(str(n) for n in (below, below + world) if n > 0)
        message = f"found {training.global_batch}, which {world} workers cannot share evenly"
        return [_inconsistent("/training/global_batch", message, f"Use {near}, or change /mesh.")]
    share = training.global_batch // world
    if training.micro_batch is not None and share % training.micro_batch:
        message = f"found {training.micro_batch}, which does not divide the {share} sequences of a worker's step"
        return [_inconsistent("/training/micro_batch", message, f"Use a divisor of {share}.")]
    return []


def _inconsistent(pointer: str, message: str, cure: str) -> FieldError:
    return FieldError(pointer=pointer, code="inconsistent", message=message, suggestion=cure)
