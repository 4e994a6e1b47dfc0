"""`python compare_checkpoints.py A B RANKS`: largest difference of weights and of optimizer state of two checkpoints.

Run with the Python of the trainer, for torch. Prints {"model": x, "optim": y, "tensors": n}; 0.0: the same bits.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor below `value` under its path; a sharded one as its local part."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(f"{name}/{key}", item)
    elif torch.is_tensor(value):
        yield name, getattr(value, "_local_tensor", value).double()


def load(checkpoint: Path, kind: str, ranks: int) -> dict[str, torch.Tensor]:
    """All tensors of one kind of file, of all ranks."""
    found = {}
    for rank in range(ranks):
        name = f"{kind}_world_size_{ranks}_rank_{rank}.pt"
        path = (
            checkpoint / "actor" / name if (checkpoint / "actor").is_dir() else checkpoint / name
        )  # SFT: no level more
        found |= dict(tensors(str(rank), torch.load(path, weights_only=False, map_location="cpu")))
    return found


def main() -> None:
    """See the module."""
    one, other, ranks = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    result: dict[str, float] = {"tensors": 0}
    for kind in ("model", "optim"):
        a, b = load(one, kind, ranks), load(other, kind, ranks)
        assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
        result["tensors"] += len(a)
        result[kind] = max(float((a[key] - b[key]).abs().max()) for key in a if a[key].numel())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
