"""What is left of an attempt, and making sure that nothing is."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from worker.actors._verify import survivors

__all__ = ["dead_nodes", "describe_cluster", "kill_and_verify", "remove_group"]

_SIGKILL_AFTER_S = 3.0
_GIVE_UP_AFTER_S = 15.0


def describe_cluster() -> str:
    """Say what the cluster has in all, what its largest node has, and what is free."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    largest = max(nodes, key=lambda node: node["Resources"].get("CPU", 0.0), default=None)
    parts = [f"the cluster has {_show(ray.cluster_resources())} on {len(nodes)} nodes"]
    if largest is not None:
        parts.append(f"its largest node {_show(largest['Resources'])}")
    parts.append(f"free now: {_show(ray.available_resources())}")
    return ", ".join(parts)


def dead_nodes(where: list[dict[str, str | int]]) -> str:
    """Name the nodes of ranks that Ray holds for dead, with those ranks; empty when there are none."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    ranks: defaultdict[str, list[str]] = defaultdict(list)
    for rank, place in enumerate(where):
        if place["node_id"] not in alive:
            ranks[f"{place['node_id']} ({place['host']})"].append(str(rank))
    return "; ".join(f"node {node} of rank {', '.join(which)} is gone" for node, which in ranks.items())


def _show(resources: dict[str, float]) -> str:
    parts = [f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU")]
    return ", ".join([*parts, f"{resources.get('memory', 0.0) / 2**30:.1f} GiB memory"])


def kill_and_verify(actors: list[Any], where: list[dict[str, str | int]]) -> list[str]:
    """Kill the actors and wait until their processes are gone.

    Args:
        where: of each actor: ``node_id``, ``pid`` and ``started``; empty when they never answered.

    Returns:
        What could not be verified, as text.
    """
    for actor in actors:
        ray.kill(actor)
    by_node: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for place in where:
        by_node[str(place["node_id"])].append((int(place["pid"]), int(place["started"])))
    begin, problems = time.monotonic(), []
    while by_node:
        force = time.monotonic() - begin > _SIGKILL_AFTER_S
        for node_id, processes in list(by_node.items()):
            left = _survivors_on(node_id, processes, force)
            if left:
                by_node[node_id] = [entry for entry in processes if entry[0] in left]
            else:
                del by_node[node_id]
        if by_node and time.monotonic() - begin > _GIVE_UP_AFTER_S:
            pids = [pid for processes in by_node.values() for pid, _ in processes]
            problems.append(f"processes {pids} could not be verified gone")
            break
        if by_node:
            time.sleep(0.1)
    return problems


def _survivors_on(node_id: str, processes: list[tuple[int, int]], kill: bool) -> list[int]:
    """Ask a node which of the processes still live; a dead node has none."""
    alive_nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if node_id not in alive_nodes:
        return []
    here = ray.get_runtime_context().get_node_id() == node_id
    if here:
        return survivors(processes, kill)
    task = ray.remote(survivors).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    )
    with contextlib.suppress(RayError):
        return list(ray.get(task.remote(processes, kill), timeout=10))
    return [pid for pid, _ in processes]


def remove_group(group: Any) -> list[str]:
    """Remove the placement group and wait until Ray says so; return what could not be verified."""
    if group is None:
        return []
    remove_placement_group(group)
    deadline = time.monotonic() + _GIVE_UP_AFTER_S
    while time.monotonic() < deadline:
        if placement_group_table(group).get("state") == "REMOVED":
            return []
        time.sleep(0.1)
    return [f"placement group {group.id.hex()} could not be verified removed"]
