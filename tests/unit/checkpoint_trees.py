"""Checkpoint directories as verl 0.9.1 writes them, a few bytes in size, for the tests of the checkpoint modules."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


def torch_bytes(payload: bytes = b"tensor") -> bytes:
    """What `torch.save` writes: a zip archive without a comment."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/data/0", payload * 20)
    return buffer.getvalue()


def torch_bytes_64() -> bytes:
    """The same with the 64-bit records; the plain fields say "see there", as in archives over 4 GiB."""
    small = torch_bytes()
    count, size, offset = struct.unpack("<HII", small[-12:-2])
    record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(small) - 22, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return small[:-22] + record + locator + end


def safetensors_bytes(tensor_bytes: int = 64) -> bytes:
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"data_offsets": [0, tensor_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(tensor_bytes)


class Metadata:
    """Pickles like torch.distributed.checkpoint's class of that name: an object with `storage_data` in its state."""

    def __init__(self, storage_data: dict[object, object]) -> None:
        self.state_dict_metadata: dict[str, object] = {"common_state/shard_0_1": None}
        self.storage_data = storage_data


class StorageInfo:
    def __init__(self, relative_path: str, offset: int, length: int) -> None:
        self.relative_path, self.offset, self.length = relative_path, offset, length


def write(path: Path, data: bytes | str | dict[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(data, dict):
        data = json.dumps(data)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def dist_ckpt(tree: Path, ranks: int = 2) -> None:
    """A Megatron `torch_dist` tree as of megatron-core 0.19: shards, index, metadata.json."""
    storage: dict[object, object] = {}
    for rank in range(ranks):
        shard = torch_bytes(b"shard")
        write(tree / f"__{rank}_0.distcp", shard)
        storage[f"weight.{rank}"] = StorageInfo(f"__{rank}_0.distcp", 0, len(shard) - 10)
        storage[f"bias.{rank}"] = StorageInfo(f"__{rank}_0.distcp", len(shard) - 10, 10)
    write(tree / ".metadata", pickle.dumps(Metadata(storage)))
    write(tree / "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1})


def fsdp_shards(engine: Path, world: int = 2, contents: tuple[str, ...] = ("model", "optim", "extra_state")) -> None:
    for stem in contents:
        for rank in range(world):
            write(engine / f"{stem}_world_size_{world}_rank_{rank}.pt", torch_bytes())
    write(engine / "fsdp_config.json", {"FSDP_version": 2, "world_size": world})
    write(engine / "huggingface" / "config.json", {"model_type": "qwen2"})


def megatron_engine(
    engine: Path, step: int, world: int = 4, contents: tuple[str, ...] = ("model", "extra"), hf_model: bool = True
) -> None:
    """`hf_model`: the model slot is a Hugging Face export (the default); else a dist_ckpt tree."""
    entries: dict[str, object] = {}
    if "model" in contents and hf_model:
        names = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
        for name in names:
            write(engine / "model/huggingface" / name, safetensors_bytes())
        index = {"weight_map": {"a": names[0], "b": names[1]}}
        write(engine / "model/huggingface/model.safetensors.index.json", index)
        write(engine / "model/huggingface/config.json", {"model_type": "deepseek_v4"})
        entries["model"] = {"path": "model/huggingface", "format": "huggingface", "backend": "mbridge"}
        entries["hf_config"] = {"path": "model/huggingface", "format": "huggingface"}
    elif "model" in contents:
        dist_ckpt(engine / "model/dist_ckpt")
        entries["model"] = {"path": "model/dist_ckpt", "format": "megatron_dist_checkpoint"}
    if "optimizer" in contents:
        dist_ckpt(engine / "optimizer/dist_ckpt")
        entries["optimizer"] = {"path": "optimizer/dist_ckpt", "format": "megatron_dist_checkpoint"}
        entries["lr_scheduler"] = {**entries["optimizer"], "key": "lr_scheduler"}  # type: ignore[dict-item]
    if "extra" in contents:
        dist_ckpt(engine / "extra/dist_ckpt")
        write(engine / "transformer_config.json", {"num_layers": 2})
        entries["rng_state"] = {"path": "extra/dist_ckpt", "format": "megatron_dist_checkpoint", "key": "rng_state"}
        entries["transformer_config"] = {"path": "transformer_config.json", "format": "json"}
    manifest = {"schema_version": 2, "global_step": step, "world_size": world, "save_contents": list(contents)}
    write(engine / "ckpt_contents.json", {**manifest, "contents": entries})


def ppo_fsdp(directory: Path, step: int, world: int = 2) -> Path:
    root = directory / f"global_step_{step}"
    fsdp_shards(root / "actor", world)
    write(root / "data.pt", torch_bytes())
    return root


def ppo_megatron(
    directory: Path, step: int, contents: tuple[str, ...] = ("model", "extra"), hf_model: bool = True
) -> Path:
    root = directory / f"global_step_{step}"
    megatron_engine(root / "actor", step, contents=contents, hf_model=hf_model)
    write(root / "data.pt", torch_bytes())
    return root


def sft_fsdp(directory: Path, step: int, world: int = 4, data_ranks: int = 4) -> Path:
    root = directory / f"global_step_{step}"
    fsdp_shards(root, world)
    for rank in range(data_ranks):
        write(root / f"data_{rank}.pt", torch_bytes())
    return root


def sft_megatron(directory: Path, step: int, data_ranks: int = 2) -> Path:
    root = directory / f"global_step_{step}"
    megatron_engine(root, step, contents=("model", "optimizer", "extra"))
    for rank in range(data_ranks):
        write(root / f"data_{rank}.pt", torch_bytes())
    return root


def tracker(directory: Path, content: str | bytes | int) -> Path:
    return write(directory / TRACKER, str(content) if isinstance(content, int) else content)


def cut(path: Path, by: int = 1) -> None:
    """Truncate, as a full disk or a killed writer does."""
    path.write_bytes(path.read_bytes()[:-by])


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file below `root` with its content."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def what_verl_resumes(directory: Path) -> int | None:
    """verl's `find_latest_ckpt_path`, word for word: the step, None for "from scratch"; raises on an empty tracker."""
    path = directory / TRACKER
    if not path.exists():
        return None
    iteration = int(path.read_bytes().decode())
    return iteration if (directory / f"global_step_{iteration}").exists() else None
