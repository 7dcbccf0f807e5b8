"""Who may import whom."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.source import ROOT, Module, imports, modules

STDLIB = sys.stdlib_module_names


def _outside(module: Module) -> set[str]:
    """Top-level names of what ``module`` imports beyond the standard library."""
    return {name.split(".")[0] for _, name in imports(module)} - STDLIB


def _offenders(found: dict[str, set[str]]) -> str:
    return "; ".join(f"{name} imports {sorted(names)}" for name, names in found.items() if names)


def test_runtime_depends_on_torch_alone() -> None:
    allowed = {"torch", "dmuon_runtime", "triton", "quack", "cutlass"}
    found = {m.name: _outside(m) - allowed for m in modules("dmuon_runtime")}
    assert not any(found.values()), _offenders(found)


def test_contract_depends_on_pydantic_and_yaml_alone() -> None:
    allowed = {"pydantic", "yaml", "worker"}
    contract = [m for m in modules("worker") if m.name.startswith("worker.contract")]
    found = {m.name: _outside(m) - allowed for m in contract}
    assert not any(found.values()), _offenders(found)
    beyond = {
        m.name: {n for _, n in imports(m) if n.startswith("worker") and not n.startswith("worker.contract")}
        for m in contract
    }
    assert not any(beyond.values()), _offenders(beyond)


def test_orchestrator_knows_only_the_contract() -> None:
    found = {}
    for module in modules("orchestrator"):
        names = {name for _, name in imports(module)}
        found[module.name] = {
            name
            for name in names
            if name.split(".")[0] in {"torch", "transformers", "dmuon_runtime", "numpy", "dashboards"}
            or (name.split(".")[0] == "worker" and not name.startswith("worker.contract"))
        }
    assert not any(found.values()), _offenders(found)


def test_worker_knows_no_control_plane() -> None:
    forbidden = {"orchestrator", "fastapi", "uvicorn", "sqlalchemy", "alembic", "prometheus_client"}
    found = {m.name: _outside(m) & forbidden for m in modules("worker")}
    assert not any(found.values()), _offenders(found)


def test_ray_has_two_doors() -> None:
    users = {m.name for m in modules() if "ray" in _outside(m)}
    beyond = {name for name in users if name != "orchestrator.launcher" and not name.startswith("worker.actors")}
    assert not beyond, f"ray is imported outside its two doors, by {sorted(beyond)}"
    assert "orchestrator.launcher" in users


def test_actor_modules_import_without_torch() -> None:
    """The control plane unpickles the actor class when it looks a supervisor up, and must not load torch by that."""
    names = [m.name for m in modules("worker") if m.name.startswith("worker.actors")]
    _import_without_torch(*names)


@pytest.mark.parametrize("entry", ["orchestrator.api", "orchestrator.cli", "orchestrator.launcher"])
def test_orchestrator_process_has_no_torch(entry: str) -> None:
    _import_without_torch(entry)


def _import_without_torch(*names: str) -> None:
    assert names
    code = f"""
import importlib, sys
for name in {list(names)!r}: importlib.import_module(name)
heavy = sorted({{m.split('.')[0] for m in sys.modules}} & {{'torch', 'transformers', 'dmuon_runtime'}})
sys.exit(f'loaded {{heavy}}' if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
