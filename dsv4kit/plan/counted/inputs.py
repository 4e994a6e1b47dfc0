"""What the planner is asked about. Plain values, so that it needs no profile; lengths are in tokens."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dsv4kit.plan.counted.geometry import ModelShape

RecipeKind = Literal["grpo", "sft"]


class NodeKind(NamedTuple):
    """One kind of node."""

    name: str
    gpus_per_node: int
    hbm_gib: float
    host_gb: float
    cpu_architecture: str
    nvlink_domain_gpus: int
    sm_architecture: int
    cpu_numa_nodes: tuple[int, ...] = (0, 1)
    pinned_counts_as_used: bool = True
    # An H100's, where the hardware file says nothing.
    tflops: float = 989
    hbm_tb_per_s: float = 3.35
    nvlink_gb_per_s: float = 450
    network_gb_per_s: float = 50
    host_link_gb_per_s: float = 55


class ActorSplit(NamedTuple):
    """Megatron's split of the actor over `nodes` x `gpus_per_node` GPUs (order tp-cp-ep-dp-pp)."""

    nodes: int
    gpus_per_node: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1

    @property
    def world(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def ranks_per_stage(self) -> int:
        """GPUs of one pipeline stage: a contiguous block of ranks, which shards the dense optimizer state."""
        return self.world // self.pipeline

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Copies of each expert, over which its optimizer state is sharded."""
        return self.world // (self.pipeline * self.expert)


class RolloutSplit(NamedTuple):
    """One vLLM replica and its memory share; `sleep_level` 1 keeps a copy of its weights on the host.

    `max_sequences`: those one data-parallel rank works on at a time; None: its share of a step. `bucket_mb`: weights
    are handed over in pieces of this size.
    """

    tensor: int
    data: int
    expert: int
    utilization: float = 0.5
    max_batched_tokens: int = 8192
    kv_bytes: Literal[1, 2] = 1
    sleep_level: Literal[1, 2] = 2
    max_sequences: int | None = None
    bucket_mb: int = 512

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.data


class Levers(NamedTuple):
    """Where the optimizer lives, and in what precision."""

    cpu_offload: bool = False
    offload_fraction: float = 1.0
    precision_aware: bool = False
    bf16_gradients: bool = False
    gpu_state_bytes: int = 8
    param_offload: bool = False
    optimizer_offload: bool = False
    pinned_round_threshold_mb: int | None = None
    object_store_gib: float = 32.0

    @property
    def on_cpu(self) -> float:
        """Share of the parameters whose Adam runs on the CPU."""
        return self.offload_fraction if self.cpu_offload else 0.0


class Work(NamedTuple):
    """One step: sequences, their lengths, and the tokens of one micro-batch on one rank.

    `packed`: verl fills micro-batches up to so many tokens; else they hold a fixed number of sequences.
    """

    sequences: int
    prompt_tokens: int
    response_tokens: int
    micro_batch_tokens: int
    mean_response_tokens: int | None = None
    packed: bool = True

    @property
    def sequence_tokens(self) -> int:
        """The longest sequence."""
        return self.prompt_tokens + self.response_tokens

    @property
    def mean_tokens(self) -> int:
        """A sequence as times go by it: the longest, unless the mean response is known."""
        return self.prompt_tokens + (self.mean_response_tokens or self.response_tokens)


class Training(NamedTuple):
    """What a step does with its sequences.

    `updates` of the optimizer in each of `epochs` passes over them; `reference`: the log-probabilities of a reference
    policy, another set of weights; `recompute`: activations are made again in the backward pass; `validate_every`:
    steps between validations, None for none.
    """

    epochs: int = 1
    updates: int = 1
    reference: bool = False
    recompute: bool = True
    validate_every: int | None = None


class RunLength(NamedTuple):
    """Length of the run and of a segment."""

    steps: int = 1000
    segment_steps: int = 40
    save_freq: int = 10
    time_limit_s: float = 14400
    warm_jit: bool = False
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None


class Question(NamedTuple):
    """Everything the planner needs to know; `placed`: the batch script itself asks for topology.slurm_segment."""

    model: str
    geometry: ModelShape
    hardware: NodeKind
    recipe: RecipeKind
    parallel: ActorSplit
    work: Work
    layout: str | None = None
    mtp: bool = False
    rollout: RolloutSplit | None = None
    levers: Levers = Levers()
    contents: tuple[str, ...] = ("model", "extra")
    dist_checkpoint: bool = False
    fully_reshardable: bool = False
    schedule: RunLength = RunLength()
    env: tuple[tuple[str, str], ...] = ()
    placed: bool = False
    training: Training = Training()
    not_considered: tuple[str, ...] = ()

    @property
    def mtp_layers(self) -> int:
        """MTP layers that are built."""
        return self.geometry.mtp_layers if self.mtp else 0
