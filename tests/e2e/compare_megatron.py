"""`python compare_megatron.py A B`: what differs between two Megatron checkpoints of verl.

Run with the Python of the trainer, for torch. Prints {"weights": n, "differing": [names], "optimizer": {name: share}}:
the share of an optimizer tensor's values that differ. Between the parameters of a buffer lies padding that Megatron
never sets: two runs differ there from their first checkpoint on.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of a distributed checkpoint; pieces of no shape of their own stay out."""
    reader = FileSystemReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(kept.size, dtype=kept.properties.dtype)
        for name, kept in stored.items()
        if isinstance(kept, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def main() -> None:
    """See the module."""
    one, other = Path(sys.argv[1]), Path(sys.argv[2])
    exported = "model/huggingface/model.safetensors"
    a, b = load_file(one / exported), load_file(other / exported)
    weights = [name for name in a if not torch.equal(a[name], b[name])]
    x, y = tensors(one / "optimizer" / "dist_ckpt"), tensors(other / "optimizer" / "dist_ckpt")
    shares = {name: float((value != y[name]).float().mean()) for name, value in x.items()}
    assert (a.keys(), x.keys()) == (b.keys(), y.keys())
    print(json.dumps({"weights": len(a), "differing": weights, "optimizer": shares}))


if __name__ == "__main__":
    main()
