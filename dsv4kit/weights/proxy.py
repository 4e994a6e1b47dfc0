"""The first layers of a released DeepSeek-V4 checkpoint as a checkpoint of their own: the weights of a proxy run.

Tensors are called as released (`embed.weight`, `layers.0.attn.wq_a.weight`, `mtp.0.e_proj.weight`, `hc_head_fn`) or as
transformers saves them (`model.layers.0.self_attn...`); a multi-token-prediction layer that is numbered behind the
decoder layers, as DeepSeek-V3 had it, moves up. Names: transformers `conversion_mapping.py`, vLLM
`models/deepseek_v4/*/mtp.py`. Tensors outside the layers are kept, and so is every file without weights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsv4kit.errors import UserError, nearest
from dsv4kit.weights.safetensors_files import Shard, Tensor, copy_tensors, read_header

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LAYER = re.compile(r"((?:model\.)?layers\.)(\d+)(\..+)", re.DOTALL)
_MTP = re.compile(r"(?:model\.)?mtp\.\d+\.", re.ASCII)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
# One entry per layer, those of multi-token prediction last (or none for it).
_PER_LAYER = ("compress_ratios", "layer_types", "mlp_layer_types")


class Cut(NamedTuple):
    """What is kept of a checkpoint of `total` layers: the first `layers`, and what predicts more tokens if `mtp`."""

    total: int
    layers: int
    mtp: bool

    def new_name(self, name: str) -> str | None:
        """What the tensor is called in the cut checkpoint; None where it is left out."""
        if match := _LAYER.fullmatch(name):
            number = int(match[2])
            if number < self.layers:
                return name
            if number < self.total or not self.mtp:
                return None
            return f"{match[1]}{self.layers + number - self.total}{match[3]}"
        return None if _MTP.match(name) and not self.mtp else name

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """`config.json` of the cut checkpoint."""
        cut = {key: self._list(key, value) for key, value in config.items()}
        cut["num_hidden_layers"] = self.layers
        if isinstance(hashed := config.get("num_hash_layers"), int):
            cut["num_hash_layers"] = min(hashed, self.layers)
        if not self.mtp:
            cut["num_nextn_predict_layers"] = 0
        return cut

    def _list(self, key: str, value: Any) -> Any:
        if not isinstance(value, list) or (key not in _PER_LAYER and len(value) != self.total):
            return value
        return [*value[: self.layers], *(value[self.total :] if self.mtp else [])]


def cut_checkpoint(source: Path, destination: Path, layers: int, mtp: bool, say: Callable[[str], None]) -> None:
    """Writes the first `layers` layers of the checkpoint in `source` to the new directory `destination`.

    Nothing is left of it where something fails. `say` gets a line per file. Raises UserError.
    """
    config = _json(source / "config.json")
    cut = Cut(_layer_count(source, config), layers, mtp and config.get("num_nextn_predict_layers") != 0)
    if not 1 <= layers < cut.total:
        raise UserError(f"--layers={layers}: {source} has {cut.total}; 1 to {cut.total - 1} of them can be kept")
    if destination.exists() or destination.is_symlink():
        raise UserError(f"--out={destination}: exists already")
    if not destination.parent.is_dir():
        raise UserError(f"--out={destination}: there is no directory {destination.parent}")
    parts = _parts(source, cut)
    total = sum(tensor.size for _, wanted in parts for tensor in wanted)
    free = shutil.disk_usage(destination.parent).free
    if total > free:
        raise UserError(f"--out={destination}: {total / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
    staging = destination.with_name(f".{destination.name}.{os.getpid()}")
    try:
        staging.mkdir()
        _write(source, staging, config, cut, parts, total, say)
        staging.rename(destination)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:  # a write; it does not say where
            raise UserError(f"--out={destination}: {error.strerror or error}") from None
        raise


def _write(
    source: Path,
    staging: Path,
    config: Mapping[str, Any],
    cut: Cut,
    parts: list[tuple[Shard, list[Tensor]]],
    total: int,
    say: Callable[[str], None],
) -> None:
    _copy_others(source, staging)
    (staging / "config.json").write_text(json.dumps(cut.config(config), indent=2, ensure_ascii=False) + "\n", "utf-8")
    done = 0
    weight_map: dict[str, str] = {}
    for number, (shard, wanted) in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        copy_tensors(shard, wanted, staging / name, lambda old: str(cut.new_name(old)))
        done += sum(tensor.size for tensor in wanted)
        weight_map |= {str(cut.new_name(tensor.name)): name for tensor in wanted}
        say(f"{name}: {len(wanted)} tensors of {shard.path.name}; {done / 1e9:.1f} of {total / 1e9:.1f} GB")
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (staging / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _parts(source: Path, cut: Cut) -> list[tuple[Shard, list[Tensor]]]:
    """What is to be copied of which file. Refuses a checkpoint that is not whole in the part that is kept."""
    files = _files(source, cut)
    parts = []
    found: set[str] = set()
    for file, expected in files.items():
        shard = read_header(source / file)
        there = {tensor.name for tensor in shard.tensors}
        if expected is not None and (lacking := sorted(expected - there)):
            raise UserError(f"{source / file}: has no tensor {lacking[0]!r}, which {INDEX} says it has")
        wanted = [tensor for tensor in shard.tensors if cut.new_name(tensor.name) is not None]
        found |= {tensor.name for tensor in wanted}
        if wanted:
            parts.append((shard, wanted))
    numbers = {int(match[2]) for name in found if (match := _LAYER.fullmatch(name))}
    for number in range(cut.layers):
        if number not in numbers:
            raise UserError(f"{source}: no tensors of layer {number}; not named as DeepSeek-V4's are, or not whole")
    if cut.mtp and not any(_MTP.match(name) for name in found) and max(numbers) < cut.total:
        raise UserError(f"{source}: no tensors of multi-token prediction; --no-mtp does without")
    return parts


def _files(source: Path, cut: Cut) -> dict[str, set[str] | None]:
    """Files with something that is kept, and what of it the index says is there (None: there is no index)."""
    if not (source / INDEX).exists():
        if not (source / _SINGLE).exists():
            raise UserError(f"{source}: neither {INDEX} nor {_SINGLE}; a checkpoint in safetensors format is needed")
        return {_SINGLE: None}
    weight_map = _json(source / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{source / INDEX}: no weight_map in it")
    files: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise UserError(f"{source / INDEX}: {file!r}: not the name of a file beside it")
        if cut.new_name(name) is not None:
            files.setdefault(file, set()).add(name)  # type: ignore[union-attr]
    return dict(sorted(files.items()))


def _copy_others(source: Path, staging: Path) -> None:
    """Tokenizer, templates, code: all files that are neither weights nor written anew; links as what they lead to."""
    for directory, below, names in os.walk(source):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            if name.endswith((*_WEIGHTS, ".index.json")) or name.startswith(".") or name == "config.json":
                continue
            target = staging / Path(directory, name).relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(directory, name), target)


def _layer_count(source: Path, config: Mapping[str, Any]) -> int:
    kind, count = config.get("model_type"), config.get("num_hidden_layers")
    if kind != "deepseek_v4":
        raise UserError(f"{source / 'config.json'}: model_type={kind!r}: deepseek_v4 is needed{_closest(kind)}")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError(f"{source / 'config.json'}: num_hidden_layers={count!r}: not a whole number above 0")
    return count


def _closest(kind: object) -> str:
    return nearest(str(kind), ["deepseek_v4"])


def _json(path: Path) -> dict[str, Any]:
    content: Any = None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        pass
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content
