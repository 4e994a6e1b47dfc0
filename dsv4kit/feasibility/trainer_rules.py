"""What would fail hours later, in a queue or on 64 nodes, is refused here: one function per rule.

A rule yields what is wrong: the setting, why it cannot work, what would. Sources are files of verl 0.9.1, Megatron-LM,
or threads upstream; memory is the planner's affair, data that of `data_checks`. `refusals` has all rules of the kit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from dsv4kit.config.schema import Settings
from dsv4kit.errors import nearest
from dsv4kit.feasibility.case import Case, Refusal
from dsv4kit.plan.counted.checks import fits_rollout_tensor
from dsv4kit.verl_keys.pairs import (
    batched_tokens,
    data_parallel,
    is_sft,
    longest_sequence,
    micro_batch_tokens,
    replica_gpus,
)
from dsv4kit.verl_keys.rollout import expert_parallel

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
# DeepGEMM's MXFP4 experts on GB200 died in vLLM's profiling run at 10,240 batched tokens, and ran at this many.
_DEEP_GEMM_TOKENS = 4096
_HOPPER, _BLACKWELL = 90, 100
_PLUGINS = Path(__file__).parents[1] / "plugin"


def node_unit(settings: Settings) -> int:
    """Legal node counts are multiples of this: whole pipelines, expert groups, context groups and rollout replicas."""
    actor, per_node = settings.parallel.actor, settings.hardware.gpus_per_node
    gpus = math.lcm(
        actor.tensor_parallel_size * actor.pipeline_parallel_size * actor.context_parallel_size,
        actor.pipeline_parallel_size * actor.expert_parallel_size * actor.expert_tensor_parallel_size,
        1 if is_sft(settings) else replica_gpus(settings),
    )
    return math.lcm(gpus, per_node) // per_node


def nodes(case: Case) -> Iterator[Refusal]:
    """Megatron `parallel_state.py`; verl `engine_workers.py:655`."""
    settings, unit = case.settings, node_unit(case.settings)
    count, actor = settings.schedule.nodes, settings.parallel.actor
    if count % unit:
        fitting = fitting_nodes(settings)
        near = [max((n for n in fitting if n < count), default=0), min((n for n in fitting if n > count), default=0)]
        below = count // unit * unit
        legal = " and ".join(str(n) for n in (near if any(near) else (below, below + unit)) if n)
        reason = f"PP{actor.pipeline_parallel_size} x EP{actor.expert_parallel_size}"
        if actor.context_parallel_size > 1:
            reason += f" x CP{actor.context_parallel_size}"
        if not is_sft(settings):
            reason += f" and rollout replicas of {replica_gpus(settings)} GPUs"
        gpus = settings.hardware.gpus_per_node
        why = f"{settings.profile} needs a multiple of {unit} ({reason} on nodes of {gpus} GPUs)"
        yield case.refusal("schedule.nodes", count, why, f"nearest: {legal}")


def rollout_experts(case: Case) -> Iterator[Refusal]:
    """verl `workers/config/rollout.py:294`."""
    settings = case.settings
    if is_sft(settings):
        return
    expert, replica = expert_parallel(settings), replica_gpus(settings)
    if expert not in (1, replica):
        why = f"verl wants the rollout's EP to be 1 or TP x DP = {replica}"
        yield case.refusal("parallel.rollout.expert_parallel_size", expert, why)


def rollout_tensor(case: Case) -> Iterator[Refusal]:
    """verl `vllm_async_server.py:384`: with data parallelism, the ranks of a node are its GPUs over TP."""
    settings = case.settings
    tensor, gpus = settings.rollout.tensor_model_parallel_size, settings.hardware.gpus_per_node
    data = settings.parallel.rollout.data_parallel_size
    if not is_sft(settings) and not fits_rollout_tensor(tensor, data, gpus):
        why = f"does not divide the {gpus} GPUs of a node"
        if tensor % gpus == 0:
            why = f"more than the {gpus} GPUs of a node, which works only without data parallelism, here {data}"
        legal = ", ".join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)
        yield case.refusal("rollout.tensor_model_parallel_size", tensor, why, f"{legal} do")


def mini_batch(case: Case) -> Iterator[Refusal]:
    """verl `engine_workers.py:267` asserts it at the first update, after an hour of start."""
    settings = case.settings
    if settings.engine.backend != "megatron":
        return
    ranks = data_parallel(settings)
    if is_sft(settings):
        batch = settings.data.train_batch_size
        if batch % ranks:
            why = f"not a multiple of the {ranks} data-parallel ranks"
            nearest_batches = f"nearest: {_multiples(batch, ranks)}{_or_nodes(settings)}"
            yield case.refusal("data.train_batch_size", batch, why, nearest_batches)
        return
    prompts, samples = case.verl(f"{_ACTOR}.ppo_mini_batch_size") or settings.data.train_batch_size, settings.rollout.n
    if settings.data.train_batch_size < prompts:
        why = f"smaller than ppo_mini_batch_size = {prompts} (verl workers/config/actor.py)"
        yield case.refusal("data.train_batch_size", settings.data.train_batch_size, why, f"at least {prompts}")
    if prompts * samples % ranks:
        step = ranks // math.gcd(ranks, samples)
        yield case.refusal(
            "schedule.nodes",
            settings.schedule.nodes,
            f"{ranks} data-parallel ranks cannot share a mini-batch of {prompts} prompts x {samples} samples",
            f"{_multiples(prompts, step)} prompts would do (SET=data.train_batch_size=..."
            f" VERL={_ACTOR}.ppo_mini_batch_size=...){_or_nodes(settings)}",
        )


def _mini_batch(settings: Settings) -> int:
    """Samples all data-parallel ranks share at one update."""
    if is_sft(settings):
        return settings.data.train_batch_size
    prompts = settings.verl.get(f"{_ACTOR}.ppo_mini_batch_size") or settings.data.train_batch_size
    return int(prompts) * settings.rollout.n


def fitting_nodes(settings: Settings) -> list[int]:
    """Legal node counts, up to four times those asked for, whose data-parallel ranks can share the mini-batch."""
    unit, actor = node_unit(settings), settings.parallel.actor
    model = actor.tensor_parallel_size * actor.pipeline_parallel_size * actor.context_parallel_size
    ranks = max(1, unit * settings.hardware.gpus_per_node // model)
    samples = _mini_batch(settings)
    return [n * unit for n in range(1, 4 * settings.schedule.nodes // unit + 2) if samples % (n * ranks) == 0]


def _or_nodes(settings: Settings) -> str:
    """The nearest node counts that would do."""
    wanted = settings.schedule.nodes
    closest = sorted(sorted(fitting_nodes(settings), key=lambda n: abs(n - wanted))[:2])
    return f", or NODES={' or '.join(map(str, closest))}" if closest else ""


def _multiples(number: int, step: int) -> str:
    """The nearest multiples of `step` around `number`, above zero."""
    below = number // step * step
    return " or ".join(str(n) for n in (below, below + step) if n)


def batch_tokens(case: Case) -> Iterator[Refusal]:
    """A micro-batch must hold the longest sample."""
    settings = case.settings
    tokens, longest = micro_batch_tokens(settings), longest_sequence(settings)
    context = settings.parallel.actor.context_parallel_size
    if settings.engine.backend == "megatron" and tokens * context < longest:
        why = f"x CP{context} holds no sample of {longest} tokens"
        yield case.refusal("parallel.actor.micro_batch_tokens", tokens, why, f"at least {-(-longest // context)}")


def deep_gemm(case: Case) -> Iterator[Refusal]:
    """verl #8381 and #8383."""
    settings = case.settings
    if is_sft(settings):
        return
    chosen = settings.kernels.moe_backend
    unnamed = case.found.chosen_experts if case.found else case.features.moe_backend
    backend = chosen or (unnamed if settings.engine.backend == "megatron" else None)
    if backend is None or "deep_gemm" not in backend:
        return
    key = "kernels.moe_backend"
    default = "" if chosen else f"leaves verl {case.features.name} its default, {backend}, which "
    architecture, tokens = settings.hardware.sm_architecture or 0, batched_tokens(settings)
    if architecture < _BLACKWELL:
        why = f"fails on {settings.hardware.name} at load_model, its kernel needs compute capability 10.0"
        yield case.refusal(key, chosen, default + why, "marlin works")
    elif tokens > _DEEP_GEMM_TOKENS:
        yield case.refusal(
            key,
            chosen,
            f"{default}died in vLLM's profiling run at 10,240 batched tokens, here they are {tokens}",
            f"marlin works, or SET=parallel.rollout.max_num_batched_tokens={_DEEP_GEMM_TOKENS} (24 % slower generation"
            " measured)",
        )


def dsa_fusion(case: Case) -> Iterator[Refusal]:
    """Megatron-LM `transformer_config.py`: SM100 in June (verl #6603's commit), SM90 on dev since 3 July.

    What the image's Megatron wants decides where it is known, else that of the stack for the recipe; nodes look again.
    """
    settings, key = case.settings, "apply_dsa_kernel_fusion"
    architecture = settings.hardware.sm_architecture or _BLACKWELL
    wanted = (case.found and case.found.fused_attention_from) or (_BLACKWELL if is_sft(settings) else _HOPPER)
    if architecture >= wanted or settings.hardware.device == "cpu":
        return
    asked = [("kernels.dsa_fusion", settings.kernels.dsa_fusion)]
    asked += [(f"verl.{name}", value) for name, value in settings.verl.items() if name.endswith(key)]
    for name, value in asked:
        if value:
            has = f"{settings.hardware.name} has {architecture / 10:.1f}"
            whose = "the image's" if case.found and case.found.fused_attention_from else "this recipe's"
            why = f"{whose} Megatron runs fused sparse attention from compute capability {wanted / 10:.1f} on, {has}"
            yield case.refusal(name, value, why, "False is right here")


def async_save(case: Case) -> Iterator[Refusal]:
    """verl #8000, #7363, #7952: the import fails with megatron-core 0.19, and the tracker is never written."""
    for key in (f"{_ACTOR}.checkpoint.async_save", "checkpoint.async_save"):
        if case.verl(key):
            why = "breaks with megatron-core 0.19 and leaves no tracker, so that every segment would start over"
            yield case.refusal(f"verl.{key}", True, why, "False is the only value that saves")


def learning_rate(case: Case) -> Iterator[Refusal]:
    """verl `megatron_checkpoint_manager.py:943`: the schedule is saved with the optimizer, loaded only if asked."""
    settings = case.settings
    if settings.engine.backend != "megatron":
        return
    prefix = "optim" if is_sft(settings) else f"{_ACTOR}.optim"
    style, warmup = case.verl(f"{prefix}.lr_decay_style"), f"{prefix}.lr_warmup_steps"
    key = f"{prefix}.lr_decay_style"
    if style in (None, "constant"):
        key = next((k for k in (warmup, f"{warmup}_ratio") if (case.verl(k) or 0) > 0), "")
    if not key:
        return
    name, value = f"verl.{key}", case.verl(key)
    if "optimizer" not in settings.checkpoint.contents:
        yield case.refusal(
            name,
            value,
            "only a constant learning rate survives a resume without the optimizer: its schedule would start again in"
            " every segment",
            "SET=checkpoint.contents=[model,optimizer,extra], or a constant rate",
        )
    elif not case.verl(f"{prefix}.use_checkpoint_opt_param_scheduler"):
        yield case.refusal(
            name,
            value,
            "verl does not load the schedule's state by itself (verl #7953)",
            f"also VERL={prefix}.use_checkpoint_opt_param_scheduler=True",
        )
    elif not is_sft(settings) and not case.verl(f"{prefix}.lr_decay_steps"):
        yield case.refusal(
            name,
            value,
            "its length would be that of a segment",
            f"also VERL={prefix}.lr_decay_steps=<updates of the whole run>, {settings.schedule.steps} with one update"
            " per step",
        )


def optimizer(case: Case) -> Iterator[Refusal]:
    """Levers that would do nothing, or that no verl can take."""
    levers = case.settings.optimizer
    if not levers.cpu_offload and "optimizer.offload_fraction" in case.sources and levers.offload_fraction < 1:
        yield case.refusal(
            "optimizer.offload_fraction",
            levers.offload_fraction,
            "does nothing while Adam runs on the GPU",
            "SET=optimizer.cpu_offload=True moves it",
        )
    if levers.gpu_state_bytes == 2:
        why = "verl passes on fp32 and bf16 only (utils/megatron/optimizer.py)"
        yield case.refusal("optimizer.gpu_state_bytes", 2, why, "4 or 8")
    for name, value in case.settings.verl.items():
        if ".override_optimizer_config." in name and name.endswith("_dtype"):
            own = name.replace("override_optimizer_config.", "")
            yield case.refusal(
                f"verl.{name}", value, "reaches Megatron as text, not as a type", f"verl's own key is {own}"
            )


def router_replay(case: Case) -> Iterator[Refusal]:
    """verl `engine/megatron.yaml:129`, `vllm_async_server.py:437`."""
    mode = case.settings.rollout.router_replay
    if mode != "disabled" and case.settings.engine.backend != "megatron":
        yield case.refusal("rollout.router_replay", mode, "only verl's Megatron engine replays routes", "disabled here")
    if mode == "R2" and case.verl("algorithm.rollout_correction.bypass_mode"):
        yield case.refusal(
            "rollout.router_replay",
            mode,
            "R2 records routes in the log-prob pass, which algorithm.rollout_correction.bypass_mode leaves out",
            "R3 takes them from the rollout",
        )


def tokens_of_prompts(case: Case) -> Iterator[Refusal]:
    """verl `utils/tokenizer/deepseek.py`: the one place that still asks the tokenizer for a template."""
    key = "data.filter_overlong_prompts"
    geometry, template = case.settings.model.geometry, case.settings.model.chat_template_file
    if case.verl(key) and geometry is not None and not template and not is_sft(case.settings):
        why = "asks the tokenizer for a chat template, DeepSeek-V4 has none"
        yield case.refusal(f"verl.{key}", True, why, "False, or CHAT_TEMPLATE_FILE=...")


def dynamic_batches(case: Case) -> Iterator[Refusal]:
    """verl `engine_workers.py:616`."""
    actor, rollout = f"{_ACTOR}.use_dynamic_bsz", f"{_ROLLOUT}.log_prob_use_dynamic_bsz"
    ours, theirs = case.verl(actor), case.verl(rollout)
    if theirs is not None and bool(ours) != bool(theirs):
        yield case.refusal(f"verl.{actor}", ours, f"must equal {rollout}={theirs} (verl engine_workers.py)")


def determinism(case: Case) -> Iterator[Refusal]:
    """One seed for all samples of a prompt: equal answers, advantage 0."""
    key = f"{_ROLLOUT}.full_determinism"
    if case.verl(key):
        why = "all samples of a prompt become the same, every advantage 0 and nothing is learnt"
        yield case.refusal(f"verl.{key}", True, why, "DETERMINISTIC=True gives each sample a seed of its own")


def kit_modules(case: Case) -> Iterator[Refusal]:
    """Names of the kit's own modules; what else is in the image can only be seen there."""
    settings, prefix = case.settings, "pkg://"
    named: list[tuple[str, object, str]] = [(f"plugins.{name}", on, name) for name, on in settings.plugins.items()]
    if (path := settings.reward.function_path) and path.startswith(prefix):
        named.append(("reward.function_path", path, path.removeprefix(prefix)))
    known = [f"dsv4kit.plugin.{file.stem}" for file in sorted(_PLUGINS.glob("[a-z]*.py"))]
    for key, value, name in named:
        if name.partition(".")[0] == "dsv4kit" and name not in known:
            yield case.refusal(key, value, f"the kit has no module {name!r}{nearest(name, known)}")


def unseen(case: Case) -> Iterator[Refusal]:
    """Keys that change what is split or loaded behind the back of checks and plan."""
    for key, value in case.settings.verl.items():
        name = key.rpartition(".")[2]
        if name == "virtual_pipeline_model_parallel_size" and value is not None:
            why = "the kit's pipeline layout and its plan know no virtual stages"
            yield case.refusal(f"verl.{key}", value, why, "SET=parallel.actor.layout=... with one part per stage")
        elif name == "load_contents":
            why = "a resume loads exactly what the run saved"
            yield case.refusal(f"verl.{key}", value, why, "SET=checkpoint.contents=... sets both")


def dead_keys(case: Case) -> Iterator[Refusal]:
    """Keys verl has and never reads."""
    for key, reason in DEAD.items():
        if key in case.settings.verl:
            yield case.refusal(f"verl.{key}", case.verl(key), f"has no effect, {reason}")


# verl 0.9.1 and main of August 2026 alike.
DEAD = {
    "actor_rollout_ref.nccl_timeout": "no code reads it (verl #7815); torch's and Megatron's limits hold",
    "trainer.esi_redundant_time": "only the old trainer reads it; the kit itself stops before the time limit",
    "trainer.ray_wait_register_center_timeout": "only the old trainer reads it",
    f"{_ACTOR}.megatron.dist_checkpointing_prefix": "the loader is called without it (transformer_impl.py:499)",
    f"{_ACTOR}.megatron.router_replay.record_file": "no code reads it",
    f"{_ACTOR}.megatron.router_replay.replay_file": "no code reads it",
}

RULES = (
    nodes,
    rollout_experts,
    rollout_tensor,
    deep_gemm,
    dsa_fusion,
    async_save,
    learning_rate,
    optimizer,
    router_replay,
    tokens_of_prompts,
    dynamic_batches,
    determinism,
    kit_modules,
    dead_keys,
    unseen,
    mini_batch,
    batch_tokens,
)
