"""Fitted constants of one site, from runs made there.

Each run gives a value for the constants it can tell apart: the base of host memory and the head node's extra, what GPUs
hold beyond the formula, and the times. `site_constants` plans with what is kept here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median

import yaml

from dsv4kit.errors import UserError
from dsv4kit.plan.core import Memory, Plan, evaluate
from dsv4kit.plan.counted import step_time
from dsv4kit.plan.counted.coefficients import built_in
from dsv4kit.plan.counted.host_memory import REFERENCE_GPUS
from dsv4kit.plan.counted.inputs import Question
from dsv4kit.plan.fitted.calibrated import point_of
from dsv4kit.plan.fitted.measured import Observation, observe
from dsv4kit.plan.fitted.site_constants import path_of, read_runs
from dsv4kit.run.files import write_text

_GPU_MEMORY_NUMA_NODES = range(64)


def calibrate(run_dir: Path, question: Question, site: str) -> tuple[Mapping[str, float], Path]:
    """Fits the site's constants to the run and stores them; the values, and where they are kept."""
    observation = observe(run_dir, gpu_memory_numa(question))
    if not observation.peaks and observation.times is None:
        raise UserError(f"{run_dir}: no memory samples of its nodes and no metrics to fit to")
    plan = evaluate(question, built_in())
    values = fit(plan, observation)
    path = path_of(site)
    runs = [run for run in (read_runs(path) if path.is_file() else []) if run["run"] != run_dir.name]
    runs.append({"run": run_dir.name, "point": point_of(question)._asdict(), "values": values})
    write_text(path, yaml.safe_dump({"site": site, "runs": runs}, sort_keys=False))
    return values, path


def gpu_memory_numa(question: Question) -> tuple[int, ...]:
    """NUMA nodes that are GPU memory: on Grace all that are not the CPUs'."""
    if question.hardware.cpu_architecture != "aarch64":
        return ()
    return tuple(index for index in _GPU_MEMORY_NUMA_NODES if index not in question.hardware.cpu_numa_nodes)


def fit(plan: Plan, observation: Observation) -> dict[str, float]:
    """Values of the constants the observation determines, by name."""
    return {**_fit_host(plan, observation), **_fit_gpu(plan, observation), **_fit_times(plan, observation)}


def _expected(memory: Memory) -> tuple[list[float], list[float]]:
    """Per node, sorted: GB that the formula alone expects on the host, GiB on its fullest GPU."""
    host, gpu = [], []
    for node in memory.nodes:
        bare = node.physical_gb - node.base_gb - node.head_extra_gb
        need = max(memory.stages[stage].need_gib for stage in node.stages)
        host += [bare] * node.nodes
        gpu += [need] * node.nodes
    return sorted(host), sorted(gpu)


def _fit_host(plan: Plan, observation: Observation) -> dict[str, float]:
    """Nodes are matched by rank of fullness; what the median one holds beyond the formula is the base, and what the
    one with most beyond it has on top is the head node's."""
    expected, _ = _expected(plan.memory)
    measured = sorted(peaks.host_gb for peaks in observation.peaks)
    if len(measured) != len(expected) or len(measured) < 2:
        return {}
    beyond = [m - e for m, e in zip(measured, expected, strict=True)]
    base = max(0.0, median(beyond))
    arch, gpus = plan.question.hardware.cpu_architecture, plan.question.parallel.gpus_per_node
    return {
        f"host_base_gb.{arch}": base * REFERENCE_GPUS[arch] / gpus,
        f"host_head_extra_gb.{arch}": max(0.0, max(beyond) - base),
    }


def _fit_gpu(plan: Plan, observation: Observation) -> dict[str, float]:
    """One run has one length of micro-batch, so that only a constant can be told from it: it goes into the context."""
    _, expected = _expected(plan.memory)
    measured = sorted(peaks.gpu_gib for peaks in observation.peaks if peaks.gpu_gib is not None)
    if len(measured) != len(expected) or not measured:
        return {}
    arch = plan.question.hardware.cpu_architecture
    context = plan.coefficients.of("gpu_context_gib", arch)
    beyond = median(m - (e - context) for m, e in zip(measured, expected, strict=True))
    return {f"gpu_context_gib.{arch}": max(0.0, beyond)}


def _fit_times(plan: Plan, observation: Observation) -> dict[str, float]:
    q, times, hardware = plan.question, observation.times, plan.question.hardware.name
    c, shares = plan.coefficients, plan.memory.shares
    if times is None:
        return {}
    values: dict[str, float] = {}
    if times.first_s is not None:
        values[f"first_step_extra_s.{hardware}"] = max(0.0, times.first_s - times.steady_s)
    if q.recipe == "sft":
        return values | _fit_pipeline(plan, times.steady_s)
    if not times.generation_s or not times.update_weights_s or q.rollout is None:
        return values
    steps, bound = step_time.generation_bound_s(q, q.rollout, c)
    latency = (times.generation_s - step_time.prefill_s(q, c)) / steps - bound
    values[f"decode_s_per_token.{hardware}"] = max(0.0, latency / (q.geometry.num_layers / step_time.REFERENCE_LAYERS))
    values["refit_gb_per_s"] = c.of("refit_gb_per_s") * plan.step.update_weights_s / times.update_weights_s
    rest = times.steady_s - times.generation_s - times.update_weights_s
    states = step_time.cpu_states(q, shares)
    if not states:
        return values | _fit_pipeline(plan, rest)
    other = plan.step.train_s - states * c.for_hardware("cpu_adam_s_per_parameter", hardware)
    values[f"cpu_adam_s_per_parameter.{hardware}"] = max(0.0, (rest - other) / states)
    return values


def _fit_pipeline(plan: Plan, seconds: float) -> dict[str, float]:
    """The latency of a layer that makes the training part, Adam on the GPU, take `seconds`."""
    q, c = plan.question, plan.coefficients
    passes = step_time.update_slots(q) + step_time.log_prob_slots(q)
    slot = (seconds - plan.step.optimizer_s) / passes
    floors = ((slot - step_time.slot_bound_s(q, share, c)) / step_time.layers_of(share) for share in plan.memory.shares)
    return {"layer_floor_s": max(0.0, min(floors))}
