"""What the packages in this environment do, read from their source: facts that a run may depend on, and what clashes.

A version says little here: verl's main branch has one version for months, and images are patched. Each fact is read
from the code that decides it; `None` where that code is not there, or has a shape that is not known.

Standard library only: read in images at their build, on nodes, and (`clashes`, of a manifest) before a submission.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

CONFIGURATION = "megatron.core.transformer.transformer_config"
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
ROLLOUT = "verl.workers.rollout"
_START_RANK = "data_parallel_start_rank"
# verl #8308: the function by which verl itself names vLLM's expert kernels; what it names is verl's affair (DeepGEMM).
_NAMES_KERNELS = "set_default_vllm_quantization_backends"
_DEEP_GEMM = "deep_gemm"
# DeepGEMM's kernel for these experts exists from this compute capability on (verl #8381).
_DEEP_GEMM_FROM = 100
# From this vLLM on a start rank makes a node's server a balancer of its own (verl #8234).
_WANTS_START_RANK = (0, 28)


class Sources(Protocol):
    """Where source is looked up."""

    def text(self, name: str) -> str | None:
        """The source of a module, or of a package's `__init__`; None where there is none."""

    def texts(self, name: str) -> Iterator[str]:
        """The source of a package's modules, at any depth."""


class PackageFacts(NamedTuple):
    """`vllm`: its version. `leader_start_rank`: verl gives the first node of a replica a start rank (without #8234).

    `chosen_experts`: the expert kernels verl names where a run names none. `fused_attention_from`: the compute
    capability (90 for 9.0) that Megatron's fused sparse attention wants.
    """

    vllm: str | None = None
    leader_start_rank: bool | None = None
    chosen_experts: str | None = None
    fused_attention_from: int | None = None


def facts(source: Sources, vllm: str | None) -> PackageFacts:
    """What can be told of the packages there."""
    server, configuration = source.text(SERVER), source.text(CONFIGURATION)
    names_kernels = any(_NAMES_KERNELS in text for text in source.texts(ROLLOUT))
    return PackageFacts(
        vllm=vllm,
        leader_start_rank=None if server is None else gives_leader_a_start_rank(server),
        chosen_experts=_DEEP_GEMM if names_kernels else None,
        fused_attention_from=None if configuration is None else fused_attention_from(configuration),
    )


def gives_leader_a_start_rank(source: str) -> bool | None:
    """Whether the start rank is handed over whatever the node; None where the source does not mention it.

    Of the conditions around each mention the one on the number of ranks does not count: it asks whether there is any
    data parallelism at all.
    """
    tree = ast.parse(source)
    mentions = _holding(tree, lambda node: isinstance(node, ast.Constant) and node.value == _START_RANK)
    if not mentions:
        return None
    conditional = (ast.If, ast.IfExp)
    return not any(
        isinstance(node, conditional) and "data_parallel_size" not in ast.dump(node.test)
        for path in mentions
        for node in path
    )


def _holding(tree: ast.AST, wanted: Any) -> list[list[ast.AST]]:
    """The path from the root to each node that is wanted."""
    found: list[list[ast.AST]] = []
    pending: list[list[ast.AST]] = [[tree]]
    while pending:
        path = pending.pop()
        if wanted(path[-1]):
            found.append(path)
        pending += [[*path, child] for child in ast.iter_child_nodes(path[-1])]
    return found


def fused_attention_from(source: str) -> int | None:
    """Megatron's own words where it refuses: `apply_dsa_kernel_fusion requires SM90+ (Hopper or later), ...`."""
    said = re.search(r"(?:apply_dsa_kernel_fusion|dsa_kernel_backend)[^\n]*requires SM(\d+)", source)
    return int(said[1]) if said else None


def clashes(found: PackageFacts, asked: Mapping[str, Any]) -> Iterator[str]:
    """What a run asks for and these packages cannot do, a line each.

    `asked`: `sm` (compute capability, 90 for 9.0), `fused_attention`, `moe_backend` (None: named by nobody) and
    `data_parallel` (of a rollout replica); a key that is left out is not asked for.
    """
    sm, has = asked.get("sm"), f"this hardware has {(asked.get('sm') or 0) / 10:.1f}"
    wants = found.fused_attention_from
    if asked.get("fused_attention") and sm and wants and sm < wants:
        yield (
            f"the Megatron inside runs fused sparse attention from compute capability {wants / 10:.1f} on, {has};"
            " SET=kernels.dsa_fusion=False"
        )
    unnamed = "moe_backend" in asked and asked["moe_backend"] is None
    if unnamed and found.chosen_experts == _DEEP_GEMM and sm and sm < _DEEP_GEMM_FROM:
        yield (
            f"the verl inside names DeepGEMM's expert kernels where a run names none, which need compute capability"
            f" {_DEEP_GEMM_FROM / 10:.1f}, {has}; ROLLOUT_MOE_BACKEND=marlin"
        )
    if (asked.get("data_parallel") or 1) > 1 and found.leader_start_rank and _from(found.vllm, _WANTS_START_RANK):
        yield (
            f"vLLM {found.vllm} needs a verl with #8234 (no start rank for a replica's first node), and this one is"
            " without"
        )


def _from(version: str | None, least: tuple[int, int]) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return bool(numbers) and (int(numbers[1]), int(numbers[2])) >= least  # type: ignore[index]
