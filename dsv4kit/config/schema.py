"""The typed shape of everything a profile says.

A resolved profile is one `Settings` tree, merged from four kinds of YAML (recipe, model, hardware, profile) and the
user's overrides. Unknown keys are refused. Units stand in the names: `_gib` is 2**30 bytes, `_s` seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dsv4kit.config import site_values, time_limit
from dsv4kit.config.section import NUMBER, NUMBER_IN_TEXT, WHOLE, Section


def _as_text(value: object) -> object:
    """Environment values are text; YAML writes `1` and `true` without quotes."""
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int | float) else value


Text = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | float | bool)]
# Bounded, so that nothing computed from them overflows or never ends; far above anything real.
PositiveInt = Annotated[int, Field(ge=1, le=1_000_000_000), WHOLE]
NonNegativeInt = Annotated[int, Field(ge=0, le=1_000_000_000), WHOLE]
PositiveFloat = Annotated[float, Field(gt=0, le=1e9), NUMBER]
Share = Annotated[float, Field(ge=0, le=1), NUMBER]
Nodes = Annotated[int, Field(ge=1, le=20_000), WHOLE]
SlurmName = Annotated[str, AfterValidator(site_values.slurm_name)]
EnvName = Annotated[str, AfterValidator(site_values.variable)]
ModuleName = Annotated[str, AfterValidator(site_values.module)]
EnvValue = Annotated[Text, AfterValidator(site_values.line)]


def _none_is_null(value: object) -> object:
    """`none` on a command line stands for null: leave it to upstream."""
    return None if isinstance(value, str) and value.strip().lower() in ("none", "null", "") else value


Kept = Annotated[PositiveInt | None, BeforeValidator(_none_is_null)]


def _saves_something(contents: list[str]) -> list[str]:
    if not contents:
        raise ValueError("nothing would be saved; model, optimizer and extra are allowed")
    return contents


def _some(nodes: list[int]) -> list[int]:
    if not nodes:
        raise ValueError("memory has to be somewhere; [0] is the first NUMA node")
    return nodes


def _saves(value: int) -> int:
    if value < 1:
        raise ValueError("verl never saves below 1, not even the last step of a segment; 1 to segment_steps are useful")
    return value


class Hardware(Section):
    """One kind of node."""

    name: str
    description: str
    device: Literal["cuda", "cpu"] = Field(description="what verl calls the device; `cpu` trains without any GPU")
    gpus_per_node: PositiveInt = Field(description="GPUs of one node; logical ones on `cpu`")
    cpus_per_node: PositiveInt = Field(description="CPUs Ray may hand out on one node, whatever Slurm's mask says")
    min_memory_gib: PositiveFloat | None = Field(
        default=None,
        description="host memory that must be available on a node before it starts; null: what the planner counts on"
        " the fullest node, and a margin",
    )
    min_shm_gib: PositiveFloat = Field(description="free space /dev/shm needs: the object store lives there")
    hbm_usable_gib: PositiveFloat | None = Field(
        default=None,
        description="memory of one GPU as the driver shows it; null: the planner does not plan for this hardware",
    )
    memory_per_numa_node_gb: PositiveFloat | None = Field(
        default=None, description="host memory of one CPU NUMA node, nominal"
    )
    cpu_numa_nodes: Annotated[list[NonNegativeInt], AfterValidator(_some)] = Field(
        default=[0], description="NUMA nodes that are CPU memory; on Grace the GPUs' memory has nodes of its own"
    )
    nvlink_domain_gpus: PositiveInt | None = Field(default=None, description="GPUs that reach each other over NVLink")
    sm_architecture: PositiveInt | None = Field(default=None, description="compute capability, 90 for 9.0")
    cpu_architecture: Literal["x86_64", "aarch64"] | None = Field(default=None, description="as `uname -m` says")
    peak_bf16_tflops: PositiveFloat | None = Field(
        default=None, description="dense bf16 of one GPU, as marketed; here and in the next four null: an H100's"
    )
    hbm_tb_per_s: PositiveFloat | None = Field(default=None, description="bandwidth of one GPU's memory, TB/s")
    nvlink_gb_per_s: PositiveFloat | None = Field(
        default=None, description="of one GPU within its NVLink domain, one direction, GB/s"
    )
    network_gb_per_s: PositiveFloat | None = Field(default=None, description="of one GPU out of its node, GB/s")
    host_link_gb_per_s: PositiveFloat | None = Field(
        default=None, description="between one GPU and host memory, one direction, GB/s"
    )
    pinned_counts_as_used: bool = Field(
        default=True, description="whether the `used` of the usual tools includes pinned memory here"
    )


class Geometry(Section):
    """Shape of a DeepSeek-V4 model; names after its `config.json` where that has one."""

    num_layers: PositiveInt = Field(description="decoder layers, without the MTP layer")
    mtp_layers: NonNegativeInt = Field(description="multi-token-prediction layers after them")
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    head_dim: PositiveInt
    q_lora_rank: PositiveInt
    o_groups: PositiveInt
    o_lora_rank: PositiveInt
    index_heads: PositiveInt
    index_head_dim: PositiveInt
    num_experts: PositiveInt = Field(description="routed experts of one layer")
    shared_experts: NonNegativeInt
    experts_per_token: PositiveInt
    moe_intermediate_size: PositiveInt
    hash_layers: NonNegativeInt = Field(description="leading layers routed by token id; all in pipeline stage 0")
    compress_ratios: list[Annotated[Literal[0, 4, 128], NUMBER_IN_TEXT]] = Field(
        description="per layer, MTP layers last: 0 sliding window (SWA), 4 sparse (CSA), 128 heavy compression (HCA)"
    )
    sliding_window: PositiveInt
    hyper_connections: PositiveInt = Field(description="residual streams (hc_mult)")
    vocab_size: PositiveInt


class Model(Section):
    """The model to train."""

    name: str
    description: str
    path: str | None = Field(description="directory with the weights; null only for a model the kit makes itself")
    made_locally: bool = Field(default=False, description="the kit makes model and data on first use")
    checkouts: str | None = Field(
        default=None,
        description="a stack whose Megatron-LM and Megatron-Bridge are taken from checkouts (MEGATRON_LM,"
        " MEGATRON_BRIDGE); null: from where the trainer is installed",
    )
    trust_remote_code: bool = Field(default=False, description="code that lies beside the weights may run")
    chat_template_file: str | None = Field(
        default=None,
        description="Jinja template that replaces the tokenizer's: a file, read when the run is submitted, or the name"
        " of one in containers/chat-templates (CHAT_TEMPLATE_FILE)",
    )
    proxy: str | None = Field(
        default=None, description="model of the same kind with few layers, to prove image, site and data"
    )
    geometry: Geometry | None = Field(default=None, description="null: the planner has no data on this model")


class Recipe(Section):
    """What verl runs."""

    name: str
    description: str
    module: ModuleName = Field(description="the unmodified verl module that is run as the driver")
    config_name: str = Field(description="verl's Hydra configuration, as the wheel names it")
    launcher: Literal["ray", "torchrun"] = Field(
        default="ray",
        description="who starts the trainer's processes: one driver through Ray, or torchrun on every node",
    )


class Data(Section):
    """Data sets and sizes of one step; lengths in tokens, batch in prompts."""

    train_files: list[str] | None = Field(
        description="parquet files; null for the data the kit makes for its own model"
    )
    val_files: list[str] | None = Field(description="parquet files, as train_files")
    train_batch_size: PositiveInt = Field(description="prompts of one step")
    max_prompt_length: PositiveInt
    max_response_length: PositiveInt
    mean_response_length: PositiveInt | None = Field(
        default=None, description="what the planner's times go by; null: the longest"
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1), WHOLE] = Field(
        description="order of the data; fixed, so that a resumed run sees the order it would have seen"
    )


class Rollout(Section):
    """Generation with vLLM."""

    n: PositiveInt = Field(description="samples per prompt")
    tensor_model_parallel_size: PositiveInt
    router_replay: Literal["disabled", "R2", "R3"] = Field(
        default="disabled",
        description="experts the actor's router takes: its own, those of its log-prob pass (R2), or those of the"
        " rollout (R3) (ROUTER_REPLAY_MODE)",
    )
    max_num_seqs: PositiveInt | None = Field(
        default=None, description="sequences one DP rank works on at a time; null: its even share of a step's samples"
    )
    max_model_len: PositiveInt | None = Field(
        default=None, description="longest sequence vLLM takes; null: longest prompt + longest response"
    )
    kv_cache_dtype: str | None = Field(default=None, description="vLLM's kv_cache_dtype; null: vLLM decides")


class Reward(Section):
    """A reward function of one's own; null takes verl's, chosen by the data's `data_source`."""

    function_path: Annotated[str | None, AfterValidator(site_values.function_file)] = Field(
        description="Python file, or `pkg://module` for one of the kit's own"
    )
    function_name: str | None = None
    manager: str | None = Field(default=None, description="verl's reward manager; null: verl's default")
    overlong_buffer_tokens: PositiveInt | None = Field(
        default=None, description="manager dapo: the last tokens of a response that cost score; null: none do"
    )
    overlong_penalty_factor: PositiveFloat = Field(default=1.0, description="manager dapo: score lost at full length")


class Checkpoint(Section):
    """What is saved, and what a complete checkpoint therefore holds."""

    contents: Annotated[list[Literal["model", "optimizer", "extra"]], AfterValidator(_saves_something)]
    directory: Annotated[str | None, AfterValidator(site_values.absolute_or_none)] = Field(
        default=None, description="verl's default_local_dir; null: checkpoints/ in the run"
    )
    keep_last: Kept = Field(
        default=None,
        description="the newest checkpoints that stay; older ones are deleted once a newer one is complete on disk;"
        " null: all stay (KEEP_LAST)",
    )
    keep_every: Kept = Field(
        default=None, description="checkpoints of steps divisible by this stay too; null: none do (KEEP_EVERY)"
    )
    keep_best: Kept = Field(
        default=None,
        description="so many checkpoints with the highest mean reward stay too; null: none do (KEEP_BEST)",
    )
    dist_checkpoint_path: str | None = Field(
        default=None,
        description="Megatron shards to load the base weights from; with it the model is saved as bf16 shards too,"
        " not as a quantised Hugging Face tree (DIST_CKPT_PATH)",
    )


class Schedule(Section):
    """Length of the run and of its segments, in steps."""

    steps: PositiveInt = Field(description="steps of the whole run")
    segment_steps: PositiveInt = Field(description="steps one Slurm job advances the run by")
    save_freq: Annotated[int, AfterValidator(_saves), WHOLE] = Field(
        description="steps between checkpoints; the last step of a segment is always saved"
    )
    # As many failures in a row without progress as stop a run by themselves (watch.max_attempts_without_progress).
    spare_segments: NonNegativeInt = Field(
        default=2,
        description="segments more than the steps take, at the end of the chain: for those that fail. A run that is"
        " finished cancels them",
    )
    time: Annotated[str, AfterValidator(time_limit.checked)] = Field(
        description="Slurm time limit of one segment, in Slurm's own notation"
    )
    nodes: Nodes = Field(description="nodes of the run")


class Ray(Section):
    """The Ray cluster inside one segment."""

    object_store_gib: PositiveFloat
    ready_deadline_s: PositiveInt = Field(description="all nodes must have joined by then, or the segment ends")


class KeptKernels(Section):
    """What was compiled in one segment is there in the next."""

    enabled: bool = Field(default=True, description="kernels are kept between the segments of a run")
    limit_gib: PositiveFloat = Field(
        default=4.0, description="of all that is kept, on the shared file system and in each node's scratch"
    )


Action = Literal["warn", "stop", "stop_now"]


class Gate(Section):
    """What is done about bad steps, and after how many in a row; the first is told in any case."""

    action: Action = Field(
        description="warn; stop: at the next step boundary, with a checkpoint, and the chain does not go on; stop_now:"
        " without one"
    )
    in_a_row: PositiveInt = Field(description="so many bad steps in a row, and the action is due")


class AgreementGate(Gate):
    """Rollout and actor must give the same tokens the same probabilities: else the weights were not passed on."""

    least: Annotated[float, Field(gt=0, le=1), NUMBER] = Field(description="least Pearson correlation of both")
    proves: bool = Field(
        default=False, description="the run is there to prove a site, and does so only where every step agrees"
    )


class RewardGate(Gate):
    """The mean reward against that of the steps before."""

    window: PositiveInt = Field(description="steps that it is compared with")
    deviations: PositiveFloat = Field(description="a drop of so many standard deviations of the window is a collapse")
    least_drop: PositiveFloat = Field(description="a smaller drop, in units of the reward, is none")


class LengthGate(Gate):
    """The mean length of responses against that of the steps before."""

    window: PositiveInt = Field(description="steps that it is compared with")
    share: Share = Field(description="below this share of the window's median it is a collapse")


class Gates(Section):
    """What the metrics must not become; null: no such gate."""

    mode: Literal["act", "warn", "off"] = Field(
        default="act", description="act: as each gate says; warn: say it only; off: look at none (GATES)"
    )
    not_a_number: Gate | None = Field(default=None, description="loss, gradient norm or reward is NaN or infinite")
    agreement: AgreementGate | None = Field(default=None, description="rollout and actor disagree")
    reward: RewardGate | None = Field(default=None, description="the reward has collapsed")
    length: LengthGate | None = Field(default=None, description="the responses have become short")


class WatchLimits(Section):
    """When a segment is ended from the outside."""

    stall_s: PositiveInt = Field(
        description="neither a log line nor a finished step for this long is a hang; during a save the planned time of"
        " one comes on top, and time in which the job was suspended does not count"
    )
    max_attempts_without_progress: PositiveInt = Field(description="consecutive ones after which the chain stops")
    restarts: NonNegativeInt = Field(
        default=0,
        description="how often a job starts its trainer again after a fault, from the last checkpoint",
    )
    gates: Gates = Field(default=Gates(), description="what the metrics must not become")
    sample_interval_s: PositiveFloat = Field(description="period of the memory sampler on every node")


class ActorParallel(Section):
    """How Megatron splits the actor."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    expert_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = Field(
        default=1, description="ranks one expert is split over; verl's scripts for this model and the planner have 1"
    )
    layout: str | None = Field(default=None, description="pipeline layout string; null: the planner generates one")
    mtp: bool = Field(default=False, description="the multi-token-prediction layers are built and trained")
    micro_batch_tokens: PositiveInt | None = Field(
        default=None, description="tokens of one micro-batch on one rank; null: one longest sequence over CP"
    )


class RolloutParallel(Section):
    """How vLLM splits one replica; its tensor parallel size is `rollout.tensor_model_parallel_size`."""

    data_parallel_size: PositiveInt = 1
    expert_parallel_size: PositiveInt | None = Field(default=None, description="1 or TP x DP; null: TP x DP")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), NUMBER] = 0.5
    max_num_batched_tokens: PositiveInt | None = Field(
        default=None, description="sets the peak of vLLM's profiling run; null: longest prompt + longest response"
    )


class Parallel(Section):
    """The parallel layout of both engines."""

    actor: ActorParallel = ActorParallel()
    rollout: RolloutParallel = RolloutParallel()


class Optimizer(Section):
    """The memory levers of training; what each does to a node is in docs/memory.md."""

    cpu_offload: bool = Field(default=False, description="Adam runs on the CPU (Megatron's optimizer_cpu_offload)")
    offload_fraction: Share = Field(
        default=1.0, description="share of the parameters it runs on (OPTIMIZER_OFFLOAD_FRACTION)"
    )
    precision_aware: bool = Field(
        default=False, description="no second fp32 copy of the parameters on the GPU (PRECISION_AWARE_OPTIMIZER)"
    )
    bf16_gradients: bool = Field(default=False, description="bf16 gradient buffers (grad_reduce_in_fp32=False)")
    gpu_state_bytes: Annotated[Literal[2, 4, 8], NUMBER_IN_TEXT] = Field(
        default=8, description="both Adam moments on the GPU, bytes per parameter; below 8 needs precision_aware"
    )
    param_offload: bool = Field(default=False, description="verl moves weights to the host between phases")
    optimizer_offload: bool = Field(default=False, description="verl moves optimizer state to the host between phases")


class VerlEngine(Section):
    """Which of verl's engines trains, and the verl it is found in."""

    backend: Literal["fsdp", "megatron"] = Field(default="fsdp", description="verl's model_engine")
    verl: str = Field(
        default="0.9.1", description="the image's verl, by its name in verl_keys/features.yaml: what it has and lacks"
    )
    full_recompute: bool = Field(
        default=False, description="every layer's activations are computed again in the backward pass (uniform)"
    )
    recompute_num_layers: PositiveInt = Field(
        default=1,
        description="layers of one recomputed stretch, with full_recompute; the planner counts with 1. More keep fewer"
        " layer inputs and compute longer stretches again",
    )


class Kernels(Section):
    """Kernels that exist on some hardware only; null leaves the choice to the image."""

    moe_backend: Annotated[str | None, BeforeValidator(_none_is_null)] = Field(
        default=None, description="vLLM's expert kernels (ROLLOUT_MOE_BACKEND; none: upstream's default)"
    )
    dsa_fusion: bool | None = Field(default=None, description="fused sparse attention (apply_dsa_kernel_fusion)")
    rope_fusion: bool | None = Field(default=None, description="fused rotary embedding (apply_rope_fusion)")
    fused_mhc: bool | None = Field(default=None, description="fused hyper-connections (use_fused_mhc)")


Logger = Literal[
    "console",
    "file",
    "wandb",
    "tensorboard",
    "mlflow",
    "swanlab",
    "vemlp_wandb",
    "clearml",
    "trackio",
    "rl_insight",
]


class Tracking(Section):
    """Under which names trackers file the run."""

    project: str = Field(default="dsv4kit", description="verl's trainer.project_name (PROJECT_NAME)")
    experiment: str | None = Field(
        default=None, description="verl's trainer.experiment_name (EXPERIMENT_NAME); null: the run's name"
    )


class Settings(Section):
    """One resolved profile."""

    profile: str = Field(description="its name: the table's, and the hardware's")
    description: str = Field(default="", description="empty: said from recipe, model, nodes and hardware")
    hardware: Hardware
    model: Model
    recipe: Recipe
    data: Data
    rollout: Rollout
    reward: Reward
    checkpoint: Checkpoint
    schedule: Schedule
    ray: Ray
    watch: WatchLimits
    kernel_cache: KeptKernels = Field(default=KeptKernels(), description="compiled kernels, kept between segments")
    parallel: Parallel = Field(default=Parallel(), description="how the model is split over the GPUs")
    optimizer: Optimizer = Field(default=Optimizer(), description="where optimizer state lives, and in what precision")
    engine: VerlEngine = Field(default=VerlEngine(), description="what trains")
    kernels: Kernels = Field(default=Kernels(), description="which kernels it trains and generates with")
    loggers: list[Logger] = Field(
        default=["console", "file"],
        description="where verl sends metrics (LOGGER); console and file are always among them, the kit reads both",
    )
    tracking: Tracking = Field(default=Tracking(), description="names for trackers")
    deterministic: bool = Field(description="a seed per sample and a fixed batch order: resumes are bit-identical")
    plugins: dict[ModuleName, bool] = Field(
        description="module: whether verl imports it in every process (VERL_USE_EXTERNAL_MODULES)"
    )
    env: dict[EnvName, Text] = Field(description="environment of every process on every node, set before Ray starts")
    verl: dict[str, Any] = Field(description="verl's own keys, dotted, for what has no field here")
