"""Runs that repeat bit for bit, also across a stop and a resume, on one node or several (CPU platform).

Two of verl's configuration hooks, both needed::

    actor_rollout_ref.rollout.agent.agent_loop_config_path = <this directory>/deterministic.yaml
    actor_rollout_ref.rollout.agent.default_agent_loop     = seeded_single_turn
    trainer.v1.sampler.custom_sampler.path                 = pkg://dsv4kit.plugin.deterministic
    trainer.v1.sampler.custom_sampler.name                 = OrderedReplayBuffer

By default vLLM draws all unseeded requests of a batch from one generator in the order of their arrival, and verl makes
the training batch in the order of their completion. Here each sample has a seed of its own, each batch a fixed order.
verl's `rollout.full_determinism` does not do: it gives all samples of a prompt one seed, so GRPO learns nothing.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from dsv4kit.plugin.identity import DispatchOrderUuid, sample_seed, trajectory_order


def _plain(value: Any) -> Any:
    """A Python number for a NumPy or torch scalar."""
    return value.item() if hasattr(value, "item") else value


class SeededSingleTurn(SingleTurnAgentLoop):  # type: ignore[misc, unused-ignore]
    """verl's single-turn agent loop with a seed of its own for each sample."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        """One sample; `kwargs` are the columns of its dataset row and what verl adds to them."""
        seed = sample_seed(
            base=self.rollout_config.seed,
            step=_plain(kwargs["global_steps"]),
            index=_plain(kwargs["index"]),
            sample=_plain(kwargs["session_id"]),
            messages=kwargs["raw_prompt"],
        )
        return await super().run({**sampling_params, "seed": seed}, priority, **kwargs)


class OrderedReplayBuffer(ReplayBuffer):  # type: ignore[misc, unused-ignore]
    """verl's replay buffer with batches in the order of dispatch instead of completion.

    `trainer.v1.sampler.sampler_kwargs.poll_interval` (seconds) sets how often it looks for finished samples.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # verl's 2 s are most of a step when a batch takes well under one; it has no key of its own for this.
        options: Any = self.sampler_kwargs or {}
        self.poll_interval = float(options.get("poll_interval", self.poll_interval))
        # verl names each prompt uuid4() and has no hook for it. The trainer makes its buffer before its first prompt,
        # and `trainer_base` uses nothing else of `uuid`; every other module keeps the real one.
        vars(trainer_base)["uuid"] = DispatchOrderUuid()

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict[str, Any]]
    ) -> Any:
        ordered = {key: partition_snapshot[key] for key in sorted(partition_snapshot, key=trajectory_order)}
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)
