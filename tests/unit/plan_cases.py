"""The systems whose numbers are published, as questions to the planner."""

from __future__ import annotations

from pathlib import Path

import yaml

from dsv4kit.config import schema
from dsv4kit.config.loading import HERE
from dsv4kit.plan.counted.coefficients import built_in
from dsv4kit.plan.counted.geometry import ModelShape
from dsv4kit.plan.counted.inputs import ActorSplit, Levers, NodeKind, Question, RolloutSplit, Work
from dsv4kit.plan.from_settings import _hardware

BUILT_IN = built_in()


def _yaml(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def geometry(name: str) -> ModelShape:
    """A model's shape, from the file that ships."""
    values = _yaml(HERE / "models" / f"{name}.yaml")["model"]["geometry"]
    return ModelShape(**{**values, "compress_ratios": tuple(values["compress_ratios"])})


def first_layers(shape: ModelShape, layers: int) -> ModelShape:
    """A proxy model: the first layers with embedding and head, without MTP."""
    return shape._replace(num_layers=layers, mtp_layers=0, compress_ratios=shape.compress_ratios[:layers])


def hardware(name: str) -> NodeKind:
    """A kind of node, from the file that ships."""
    return _hardware(schema.Hardware(**_yaml(HERE / "hardware" / f"{name}.yaml")["hardware"]))


PRO, FLASH = geometry("dsv4-pro"), geometry("dsv4-flash")
H100, H200, GB200, GB300 = (hardware(name) for name in ("h100", "h200", "gb200", "gb300"))

ALL_OFF_THE_GPU = Levers(cpu_offload=True, param_offload=True, optimizer_offload=True, bf16_gradients=True)

# 64 nodes x 8 H100, PP32 x EP8, responses of 4096: precision-aware optimizer, bf16 gradients.
PRO_H100 = Question(
    model="dsv4-pro",
    geometry=PRO,
    hardware=H100,
    recipe="grpo",
    parallel=ActorSplit(nodes=64, gpus_per_node=8, pipeline=32, expert=8),
    work=Work(sequences=64, prompt_tokens=2048, response_tokens=4096, micro_batch_tokens=6144),
    rollout=RolloutSplit(tensor=8, data=8, expert=64),
    levers=ALL_OFF_THE_GPU._replace(precision_aware=True),
)

# 64 nodes x 4 GB200, PP16 x EP16, responses of 8192, the even layout that Megatron-Bridge makes by itself.
PRO_GB200 = Question(
    model="dsv4-pro",
    geometry=PRO,
    hardware=GB200,
    recipe="grpo",
    parallel=ActorSplit(nodes=64, gpus_per_node=4, pipeline=16, expert=16),
    work=Work(sequences=64, prompt_tokens=2048, response_tokens=8192, micro_batch_tokens=10240),
    layout="Et*4|(t*4|)*12(t*3|)*2t*3L",
    rollout=RolloutSplit(tensor=1, data=32, expert=32),
    levers=ALL_OFF_THE_GPU,
)


def flash_sft(kind: NodeKind, nodes: int, pipeline: int, mtp: bool = False) -> Question:
    """Flash SFT, EP8, sequences of 4096, Adam on the GPU."""
    return Question(
        model="dsv4-flash",
        geometry=FLASH,
        hardware=kind,
        recipe="sft",
        parallel=ActorSplit(nodes=nodes, gpus_per_node=kind.gpus_per_node, pipeline=pipeline, expert=8),
        work=Work(sequences=256, prompt_tokens=2048, response_tokens=2048, micro_batch_tokens=4096),
        mtp=mtp,
        contents=("model", "optimizer", "extra"),
    )
