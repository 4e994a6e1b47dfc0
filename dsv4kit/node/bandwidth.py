"""`torchrun ... -m dsv4kit.node.bandwidth`: how fast the nodes' collectives are, into `bandwidth.json` of the attempt.

NCCL where there are GPUs, gloo where not. Inside each node, to the next node, and over all. Bus bandwidth as nccl-tests
defines it: what one link would have to carry, independent of the number of ranks; GB are 10**9 bytes.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv4kit.run.directory import AttemptDir
from dsv4kit.run.files import write_json

# Large enough for full speed on 400 Gb/s, done in a second each.
_GPU_BYTES = 256 * 2**20
_CPU_BYTES = 8 * 2**20
_WARM_UP, _ROUNDS = 2, 5
_PATIENCE = datetime.timedelta(seconds=120)


def all_reduce_factor(ranks: int) -> float:
    """Bytes per link over bytes reduced."""
    return 2 * (ranks - 1) / ranks


def all_to_all_factor(ranks: int) -> float:
    """Bytes per link over bytes each rank has."""
    return (ranks - 1) / ranks


class Bench:
    """One rank's part in the measurements."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_PATIENCE)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self.bytes = _GPU_BYTES if on_gpu else _CPU_BYTES
        self.data = torch.ones(self.bytes // 4 // self.ranks * self.ranks, dtype=torch.float32, device=self.device)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Mean time of the action, all ranks beginning together."""
        for round_ in range(_WARM_UP + _ROUNDS):
            if round_ == _WARM_UP:
                self._wait()
                self.dist.barrier()
                began = time.monotonic()
            action()
        self._wait()
        return float(time.monotonic() - began) / _ROUNDS

    def _wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def over_all(self) -> dict[str, float]:
        """GB/s of the collectives a step lives by, over every rank."""
        if self.ranks == 1:
            return {}
        received = self.torch.empty_like(self.data)
        reduced = self.seconds(lambda: self.dist.all_reduce(self.data))
        exchanged = self.seconds(lambda: self.dist.all_to_all_single(received, self.data))
        return {
            "all_reduce_gb_s": self._rate(all_reduce_factor(self.ranks), reduced),
            "all_to_all_gb_s": self._rate(all_to_all_factor(self.ranks), exchanged),
        }

    def inside(self) -> float | None:
        """GB/s of an all-reduce inside this rank's node; None with one rank per node."""
        groups = [
            self.dist.new_group(list(range(first, first + self.per_node)))
            for first in range(0, self.ranks, self.per_node)
        ]
        if self.per_node == 1:
            return None
        mine = groups[self.rank // self.per_node]
        took = self.seconds(lambda: self.dist.all_reduce(self.data, group=mine))
        return self._rate(all_reduce_factor(self.per_node), took)

    def to_next(self) -> float | None:
        """GB/s from this rank to its peer on the next node, all nodes at once; None on one node."""
        if self.ranks == self.per_node:
            return None
        after, before = (self.rank + self.per_node) % self.ranks, (self.rank - self.per_node) % self.ranks
        received = self.torch.empty_like(self.data)

        def exchange() -> None:
            operations = [
                self.dist.P2POp(self.dist.isend, self.data, after),
                self.dist.P2POp(self.dist.irecv, received, before),
            ]
            for request in self.dist.batch_isend_irecv(operations):
                request.wait()

        return self._rate(1.0, self.seconds(exchange))

    def _rate(self, factor: float, seconds: float) -> float:
        return float(round(factor * self.data.numel() * 4 / seconds / 1e9, 3))


def main() -> None:
    """See the module."""
    bench = Bench()
    everything = bench.over_all()
    own = (socket.gethostname(), bench.inside(), bench.to_next())
    gathered: list[Any] = [None] * bench.ranks
    bench.dist.all_gather_object(gathered, own)
    if bench.rank == 0:
        nodes: dict[str, dict[str, float | None]] = {}
        for host, inside, to_next in gathered:
            slowest = nodes.setdefault(host, {"inside_gb_s": inside, "to_next_gb_s": to_next})
            for name, value in (("inside_gb_s", inside), ("to_next_gb_s", to_next)):
                slowest[name] = min(filter(None, (slowest[name], value)), default=None)
        content = {"ranks": bench.ranks, "device": bench.device.type, **everything, "nodes": nodes}
        write_json(AttemptDir(Path(os.environ["DSV4KIT_ATTEMPT_DIR"])).bandwidth_file, content)
    bench.dist.barrier()
    bench.dist.destroy_process_group()


if __name__ == "__main__":
    main()
