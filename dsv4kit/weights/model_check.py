"""Is a local directory a whole model in Hugging Face form, and the model that a profile counts on?

Headers are read and sizes compared, for the largest model in seconds; bytes only where hashes are asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv4kit.errors import UserError, nearest
from dsv4kit.weights.safetensors_files import read_header

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
# `config.json` of deepseek_v4 (transformers `configuration_deepseek_v4.py`) -> the kit's geometry.
_SHAPE = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "index_n_heads": "index_heads",
    "index_head_dim": "index_head_dim",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "shared_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "moe_intermediate_size",
    "num_hash_layers": "hash_layers",
    "sliding_window": "sliding_window",
    "hc_mult": "hyper_connections",
    "vocab_size": "vocab_size",
}
_CHUNK = 16 * 2**20
_SHA256 = re.compile(r"[0-9a-f]{64}")


def config_of(directory: Path) -> dict[str, Any]:
    """`config.json`. Raises UserError."""
    return _json(directory / "config.json")


def shape_problems(config: Mapping[str, Any], geometry: Mapping[str, Any]) -> Iterator[str]:
    """Where the configuration says something else than the geometry; keys it does not have are not asked about."""
    if (kind := config.get("model_type")) != "deepseek_v4":
        yield f"model_type={kind!r}: deepseek_v4 is needed{nearest(str(kind), ['deepseek_v4'])}"
        return
    for key, name in _SHAPE.items():
        if key in config and name in geometry and config[key] != geometry[name]:
            yield f"{key}={_short(config[key])}: the profile has {_short(geometry[name])}"
    # A model may lack what predicts more tokens, whose layers are the last.
    layers = geometry["num_layers"]
    ratios, wanted = config.get("compress_ratios"), geometry["compress_ratios"][:layers]
    if isinstance(ratios, list) and ratios[:layers] != wanted:
        yield f"compress_ratios={_short(ratios[:layers])}: the profile has {_short(wanted)}"


def files_of(directory: Path) -> dict[str, set[str] | None]:
    """Weight files, and the tensors that the index says are in each (None: there is no index). Raises UserError."""
    if not (directory / INDEX).exists():
        if not (directory / _SINGLE).exists():
            raise UserError(f"{directory}: neither {INDEX} nor {_SINGLE}; weights in safetensors format are needed")
        return {_SINGLE: None}
    weight_map = _json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{directory / INDEX}: no weight_map in it")
    files: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{directory / INDEX}: {file!r}: not the name of a file beside it")
        files.setdefault(file, set()).add(name)  # type: ignore[union-attr]
    return dict(sorted(files.items()))


def absent(directory: Path) -> list[str]:
    """Weight files that the index names and that are not there."""
    return [name for name in files_of(directory) if not (directory / name).is_file()]


def weight_problems(directory: Path, counted: Callable[[int, int, int], None]) -> Iterator[str]:
    """Files that are missing, cut short, or lack a tensor of the index. `counted` gets files, tensors and bytes."""
    tensors = size = 0
    files = files_of(directory)
    for file, expected in files.items():
        try:
            shard = read_header(directory / file)
        except UserError as error:
            yield str(error)
            continue
        there = {tensor.name for tensor in shard.tensors}
        tensors, size = tensors + len(there), size + (directory / file).stat().st_size
        if lacking := sorted((expected or set()) - there):
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            yield f"{directory / file}: has no tensor {lacking[0]!r}{more}, which {INDEX} says it has"
    counted(len(files), tensors, size)


def tokenizer_problems(directory: Path) -> Iterator[str]:
    """A tokenizer has to lie beside the weights: nothing is fetched while a run goes."""
    if not any((directory / name).is_file() for name in _TOKENIZER):
        yield f"{directory}: no tokenizer beside the weights: none of {', '.join(_TOKENIZER)}"


def known_hashes(directory: Path, source: str) -> dict[str, str]:
    """File -> sha256: of a file as sha256sum writes it, or (`hub`) of a hub cache, whose blobs are named by it.

    Raises UserError where that says nothing about any weight file.
    """
    files = files_of(directory)
    if source == "hub":
        targets = {name: Path(os.path.realpath(directory / name)).name for name in files}
        found = {name: target for name, target in targets.items() if _SHA256.fullmatch(target)}
        if not found:
            raise UserError(f"HASHES=hub: {directory} is no snapshot in a hub's cache; HASHES=FILE names sha256sums")
        return found
    try:
        lines = Path(source).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"HASHES={source}: {getattr(error, 'strerror', None) or 'not text'}") from None
    pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2 or not _SHA256.fullmatch(pair[0].lower()):
            raise UserError(f"HASHES={source}: line {number} is none of sha256sum's")
    sums = {Path(name.lstrip("*")).name: digest.lower() for digest, name in pairs}
    if missing := sorted(files.keys() - sums.keys()):
        raise UserError(f"HASHES={source}: says nothing about {missing[0]} ({len(missing)} of {len(files)} files)")
    return {name: sums[name] for name in files}


def hash_problems(directory: Path, hashes: Mapping[str, str], say: Callable[[str], None]) -> Iterator[str]:
    """Files whose bytes are not those of the hash; all bytes are read, a line per file."""
    for number, (name, expected) in enumerate(hashes.items(), 1):
        digest = hashlib.sha256()
        with (directory / name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        say(f"{number} of {len(hashes)}: {name}")
        if digest.hexdigest() != expected:
            yield f"{directory / name}: its sha256 is {digest.hexdigest()}, not {expected}; download it again"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content
