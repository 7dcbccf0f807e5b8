"""Public names are declared, the environment is read in one place, and comments speak of the project alone."""

from __future__ import annotations

import ast
import importlib
import re

from tests.architecture.source import imports, modules

RUNTIME_NAMES = frozenset(
    {
        "Muon", "MuonAdamW", "NewtonSchulz", "POLAR_EXPRESS_COEFFICIENTS", "YOU_COEFFICIENTS",
        "KELLER_JORDAN_COEFFICIENTS",
        "clip_grad_norm_", "dedicate_params", "direct_newton_schulz", "get_backend_status", "get_counters",
        "fail_together", "get_model_state_dict", "get_ns_backend", "ignore_in_ddp", "ignored_params", "get_plan",
        "gram_newton_schulz", "newton_schulz", "no_sync",
        "build_optimizers", "plan_params", "set_model_state_dict", "summarize_comm_plan", "summarize_param_groups",
    }
)  # fmt: skip
"""What users of the runtime type: a name may be added here, none may go without a deprecation."""


def test_runtime_surface() -> None:
    runtime = importlib.import_module("dmuon_runtime")
    missing = RUNTIME_NAMES - set(runtime.__all__)
    assert not missing, f"dmuon_runtime lost {sorted(missing)}"
    assert all(hasattr(runtime, name) for name in runtime.__all__)


def test_every_module_declares_its_names() -> None:
    without = [
        m.name
        for m in modules()
        if not any(isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__" for n in m.tree.body)
        and not any(isinstance(n, ast.AnnAssign) and getattr(n.target, "id", "") == "__all__" for n in m.tree.body)
        and _defines_something_public(m.tree)
    ]
    assert not without, f"modules without __all__: {without}"


def _defines_something_public(tree: ast.Module) -> bool:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) and not node.name.startswith("_") for node in tree.body)


def test_every_module_says_what_it_is() -> None:
    silent = [m.name for m in modules() if not ast.get_docstring(m.tree)]
    assert not silent, f"modules without a docstring: {silent}"


def test_environment_is_read_in_settings_only() -> None:
    readers = []
    for module in modules():
        if module.name.endswith("settings") or "migrations" in module.name:
            continue
        names = {name for _, name in imports(module)}
        reads = re.search(r"\bos\.(environ|getenv)\b", module.text) or {"os.environ", "os.getenv"} & names
        if reads:
            readers.append(module.name)
    assert not readers, f"the environment is read outside a settings module: {readers}"


def test_comments_speak_of_the_project() -> None:
    forbidden = re.compile(r"#.*\b(TODO|FIXME|XXX|phase \d|issue \d+|as requested)\b", re.IGNORECASE)
    found = [
        f"{m.name}:{number}"
        for m in modules()
        for number, line in enumerate(m.text.splitlines(), 1)
        if forbidden.search(line)
    ]
    assert not found, f"comments that refer to a plan: {found}"
