"""The deploy files: structure, references that exist, nothing published beyond loopback."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.__main__ import GENERATED
from tests.architecture.source import ROOT

DEPLOY = ROOT / "deploy"


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return document


def test_every_reference_resolves() -> None:
    document = compose()
    for name, service in document["services"].items():
        for network in service.get("networks", []):
            assert network in document["networks"], f"{name}: no network {network}"
        for secret in service.get("secrets", []):
            source = secret if isinstance(secret, str) else secret["source"]
            assert source in document["secrets"], f"{name}: no secret {source}"
        for dependency in service.get("depends_on", []):
            assert dependency in document["services"], f"{name}: depends on {dependency}"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), f"{name}: {source} does not exist"
            else:
                assert source in document["volumes"], f"{name}: no volume {source}"
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_only_loopback_is_published_and_ray_not_at_all() -> None:
    for name, service in compose()["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port}"
        if name.startswith("ray"):
            assert "ports" not in service and service["environment"]["RAY_AUTH_MODE"] == "token"


def test_secrets_are_made_not_committed(tmp_path: Path) -> None:
    copy = tmp_path / "deploy"
    copy.mkdir()
    shutil.copy(DEPLOY / "init-secrets", copy)
    subprocess.run([str(copy / "init-secrets")], check=True, capture_output=True)
    made = {path.name: path.read_text() for path in (copy / "secrets").iterdir()}
    assert {Path(s["file"]).name for s in compose()["secrets"].values()} == set(made)
    assert all(re.fullmatch(r"[0-9a-f]{64}", text) for text in made.values())
    subprocess.run([str(copy / "init-secrets")], check=True, capture_output=True)
    assert made == {path.name: path.read_text() for path in (copy / "secrets").iterdir()}, "a second run keeps them"
    ignored = subprocess.run(["git", "check-ignore", "deploy/secrets/token"], cwd=ROOT, capture_output=True)
    assert ignored.returncode == 0


def test_settings_in_compose_exist() -> None:
    settings = (ROOT / "orchestrator" / "settings.py").read_text()
    variables = {v for v in compose()["services"]["control-plane"]["environment"] if v.startswith("DMUON_")}
    assert variables and all(f'"{variable}"' in settings for variable in variables)


@pytest.mark.parametrize("name", ["control-plane.Dockerfile", "worker.Dockerfile"])
def test_images_copy_what_exists_and_drop_root(name: str) -> None:
    text = (DEPLOY / name).read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in line.split())
    assert re.search(r"^USER (?!root)", text, re.MULTILINE)


def test_what_attempts_write_is_seen_by_the_control_plane() -> None:
    services = compose()["services"]
    images = {name: (DEPLOY / f"{name}.Dockerfile").read_text() for name in ("control-plane", "worker")}
    state = re.findall(r"^ENV DMUON_STATE_DIR=(\S+)$", images["control-plane"], re.MULTILINE)[0]
    shared = {f"{name}:{state}/{name}" for name in ("logs", "reports", "checkpoints")}
    assert set(services["control-plane"]["volumes"]) == shared | {f"state:{state}"}
    for name in ("ray-head", "ray-worker"):  # supervisors live beside the head
        assert set(services[name]["volumes"]) == shared, "and not the database"
    users = set()
    for text in images.values():  # a fresh volume takes its owner from the folder in the image
        made = re.findall(r"install -d -o dmuon -g dmuon (.+)$", text, re.MULTILINE)[0].split()
        assert {place.split(":")[1] for place in shared} <= set(made)
        users |= set(re.findall(r"useradd .*--uid (\d+) dmuon", text))
    assert len(users) == 1, "files of mode 0600 are read by the other side"


def test_compose_client_accepts_it() -> None:
    client = ["docker", "compose"]
    if shutil.which("docker") is None or subprocess.run([*client, "version"], capture_output=True).returncode:
        pytest.skip("the client `docker compose` is not installed")
    command = [*client, "-f", str(DEPLOY / "compose.yaml"), "config", "-q"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    folder = tmp_path / "prometheus"
    shutil.copytree(DEPLOY / "prometheus", folder)
    shutil.copytree(GENERATED / "prometheus", folder / "rules")
    (folder / "token").write_text("x")
    done = subprocess.run(
        ["promtool", "check", "config", str(folder / "prometheus.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout, "the rules are loaded"
    targets: list[dict[str, Any]] = yaml.safe_load((folder / "targets" / "compose.yml").read_text())
    host, port = targets[0]["targets"][0].split(":")
    service = compose()["services"][host]
    assert service["environment"]["DMUON_PORT"] == port
    (receivers,) = yaml.safe_load((folder / "alertmanagers" / "compose.yml").read_text())
    assert receivers["targets"][0].split(":")[0] in compose()["services"]


def seen_in(service: str, path: str) -> Path:
    """Return the file or folder of this tree that a container of ``service`` finds at ``path``."""
    mounts = [volume.split(":")[:2] for volume in compose()["services"][service]["volumes"] if volume.startswith(".")]
    found = [DEPLOY / source / Path(path).relative_to(at) for source, at in mounts if Path(path).is_relative_to(at)]
    assert found, f"{service} has nothing at {path}"
    return found[0].resolve()


def option(service: str, name: str) -> str:
    (found,) = [word.split("=", 1)[1] for word in compose()["services"][service]["command"] if f"--{name}=" in word]
    return found


def test_prometheus_finds_rules_targets_alertmanager_and_its_token() -> None:
    where = option("prometheus", "config.file")
    config, home = yaml.safe_load(seen_in("prometheus", where).read_text()), str(Path(where).parent)
    (rules,), (scrape,) = config["rule_files"], config["scrape_configs"]
    folder = seen_in("prometheus", f"{home}/{Path(rules).parent}")
    assert sorted(folder.glob(Path(rules).name)) == sorted((GENERATED / "prometheus").iterdir()) != []
    (alerting,) = config["alerting"]["alertmanagers"]
    for found, port in ((scrape, "8470"), (alerting, "9093")):
        ((pattern,),) = [entry["files"] for entry in found["file_sd_configs"]]
        (file,) = seen_in("prometheus", f"{home}/{Path(pattern).parent}").glob(Path(pattern).name)
        ((target,),) = [entry["targets"] for entry in yaml.safe_load(file.read_text())]
        assert target.split(":")[0] in compose()["services"] and target.split(":")[1] == port
    (secret,) = compose()["services"]["prometheus"]["secrets"]
    assert secret["target"] == f"{home}/{scrape['authorization']['credentials_file']}"
    served = Path(compose()["services"]["control-plane"]["environment"]["DMUON_TOKEN_FILE"]).name
    assert secret["source"] == served, "the token that the control plane asks for"


def test_alertmanager_loads_the_generated_routes() -> None:
    file = seen_in("alertmanager", option("alertmanager", "config.file"))
    assert file == GENERATED / "alertmanager" / "alertmanager.yml" and file.exists()


def test_grafana_provisioning_points_at_the_generated_files() -> None:
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/dmuon.yml").read_text())["providers"][0]
    mounted = [
        v for v in compose()["services"]["grafana"]["volumes"] if v.startswith("../dashboards/generated/grafana:")
    ]
    assert mounted and provider["options"]["path"] == mounted[0].split(":")[1]
    assert list((GENERATED / "grafana").glob("*.json"))
    home = compose()["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (GENERATED / "grafana" / Path(home).name).exists()
    file = seen_in("grafana", "/etc/grafana/provisioning/datasources/prometheus.yml")
    assert seen_in("grafana", "/etc/grafana/provisioning/dashboards/dmuon.yml").exists()
    sources = {source["type"]: source for source in yaml.safe_load(file.read_text())["datasources"]}
    assert {kind: source["url"] for kind, source in sources.items()} == {
        "prometheus": "http://prometheus:9090", "alertmanager": "http://alertmanager:9093",
    }  # fmt: skip
    assert set(sources) <= set(compose()["services"]) and sources["prometheus"]["isDefault"]
    assert sources["prometheus"]["jsonData"]["alertmanagerUid"] == sources["alertmanager"]["uid"]
