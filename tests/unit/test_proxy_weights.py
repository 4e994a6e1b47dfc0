"""The first layers of a checkpoint as one of their own; the names and keys are those of the released ones."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from dsv4kit.checkpoint.shard_files import safetensors_problem
from dsv4kit.cli import main
from dsv4kit.config.loading import load_settings
from dsv4kit.errors import UserError
from dsv4kit.weights.safetensors_files import read_header

RATIOS = [128, 128, 4, 128, 4, 128, 0]  # six layers, and multi-token prediction
LAYER = {
    "attn.wq_a.weight": "F8_E4M3",
    "attn.wq_a.scale": "F8_E8M0",
    "ffn.experts.0.w1.weight": "I8",
    "hc_ffn_fn": "F32",
}
WIDTH = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 6,
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 3,
    "compress_ratios": RATIOS,
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 3,
    "vocab_size": 8,
}


def names(prefix: str = "") -> dict[str, str]:
    """Tensor -> dtype, in the order of the released files."""
    tensors = {"embed.weight": "BF16"}
    for number in range(6):
        tensors |= {f"{prefix}layers.{number}.{name}": kind for name, kind in LAYER.items()}
    tensors["layers.0.ffn.gate.tid2eid"] = "I8"
    tensors |= {f"mtp.0.{name}": kind for name, kind in {**LAYER, "e_proj.weight": "BF16"}.items()}
    return tensors | {"norm.weight": "BF16", "head.weight": "BF16", "hc_head_fn": "F32"}


def content(name: str, kind: str) -> bytes:
    """Bytes of a tensor of 3 x 5 that no other has."""
    seed = (name.encode() * 60)[: 15 * WIDTH[kind]]
    return bytes((byte + index) % 256 for index, byte in enumerate(seed))


def write_shard(path: Path, tensors: dict[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, kind in tensors.items():
        bytes_ = content(name, kind)
        header[name] = {"dtype": kind, "shape": [3, 5], "data_offsets": [len(data), len(data) + len(bytes_)]}
        data += bytes_
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """Five files, layers across their borders, as the hub's cache lays them out: links to blobs."""
    root, blobs = tmp_path / "released", tmp_path / "blobs"
    root.mkdir()
    blobs.mkdir()
    tensors = list(names().items())
    weight_map = {}
    for number in range(5):
        part = dict(tensors[number * 8 : (number + 1) * 8 if number < 4 else None])
        name = f"model-{number + 1:05d}-of-00005.safetensors"
        write_shard(blobs / str(number), part)
        (root / name).symlink_to(blobs / str(number))
        weight_map |= dict.fromkeys(part, name)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text(json.dumps(CONFIG))
    (blobs / "tokenizer").write_text("{}")
    (root / "tokenizer.json").symlink_to(blobs / "tokenizer")
    (root / "encoding").mkdir()
    (root / "encoding" / "encoding_dsv4.py").write_text("pass\n")
    (root / ".cache").mkdir()
    (root / ".cache" / "lock").write_text("")
    (root / "pytorch_model.bin").write_bytes(b"old")
    return root


def cut(released: Path, *words: str) -> Path:
    out = released.parent / "four"
    assert main.run(["proxy-weights", f"--from={released}", f"--out={out}", *words]) == 0
    return out


def tensors_of(root: Path) -> dict[str, bytes]:
    """Every tensor with its bytes, by way of the index."""
    index = json.loads((root / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        (tensor,) = [tensor for tensor in read_header(root / file).tensors if tensor.name == name]
        assert tensor.shape == [3, 5]
        found[name] = (root / file).read_bytes()[tensor.begin : tensor.end]
    assert index["metadata"]["total_size"] == sum(map(len, found.values()))
    return found


def test_the_first_layers_and_all_that_is_no_layers(released: Path) -> None:
    out = cut(released)
    wanted = {name: kind for name, kind in names().items() if not name.startswith(("layers.4.", "layers.5."))}
    assert tensors_of(out) == {name: content(name, kind) for name, kind in wanted.items()}
    files = sorted(path.name for path in out.iterdir())
    weights = [name for name in files if name.endswith(".safetensors")]
    assert weights == [f"model-{n:05d}-of-{len(weights):05d}.safetensors" for n in range(1, len(weights) + 1)]
    assert set(files) - set(weights) == {"config.json", "encoding", "model.safetensors.index.json", "tokenizer.json"}
    assert (out / "encoding" / "encoding_dsv4.py").read_text() == "pass\n"
    assert not (out / "tokenizer.json").is_symlink()
    for name in weights:
        shard = read_header(out / name)
        assert shard.metadata == {"format": "pt"}
        assert shard.tensors[0].begin % 8 == 0
        assert safetensors_problem(out / name, (out / name).stat().st_size) is None
    assert [path.name for path in released.parent.iterdir() if path.name.startswith(".")] == []


def test_the_configuration_is_that_of_four_layers(released: Path) -> None:
    config = json.loads((cut(released) / "config.json").read_text())
    assert config == CONFIG | {
        "num_hidden_layers": 4,
        "compress_ratios": [128, 128, 4, 128, 0],
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"],
    }
    geometry = load_settings("gb200", "dsv4-pro-4l", "grpo").settings.model.geometry
    assert geometry is not None
    assert (geometry.num_layers, geometry.mtp_layers) == (4, config["num_nextn_predict_layers"])
    assert config["compress_ratios"] == geometry.compress_ratios


def test_without_multi_token_prediction(released: Path) -> None:
    out = cut(released, "--no-mtp", "--layers=2")
    assert not any(name.startswith("mtp.") for name in tensors_of(out))
    config = json.loads((out / "config.json").read_text())
    assert config["compress_ratios"] == [128, 128]
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"], config["num_hash_layers"]) == (2, 0, 2)


def test_one_file_without_an_index_named_as_transformers_does(released: Path) -> None:
    for path in released.glob("model*"):
        path.unlink()
    kinds = {"model.embed_tokens.weight": "BF16", "lm_head.weight": "BF16"}
    kinds |= {f"model.layers.{number}.mlp.gate.weight": "F32" for number in range(7)}  # the seventh is MTP's
    write_shard(released / "model.safetensors", kinds)
    found = tensors_of(cut(released))
    assert sorted(found) == sorted(
        [
            *(f"model.layers.{number}.mlp.gate.weight" for number in range(5)),
            "lm_head.weight",
            "model.embed_tokens.weight",
        ]
    )
    assert found["model.layers.4.mlp.gate.weight"] == content("model.layers.6.mlp.gate.weight", "F32")


def test_files_of_other_layers_need_not_be_there(released: Path) -> None:
    index = json.loads((released / "model.safetensors.index.json").read_text())
    write_shard(released / "late.safetensors", {"layers.5.extra": "F32"})
    index["weight_map"]["layers.5.extra"] = "late.safetensors"
    (released / "model.safetensors.index.json").write_text(json.dumps(index))
    (released / "late.safetensors").unlink()
    assert cut(released).is_dir()


def edit(path: Path, **changes: Any) -> None:
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, **changes}))


def shorten(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])


FIRST = "model-00001-of-00005.safetensors"
MISTAKES: dict[str, tuple[Any, str]] = {
    "no directory": (shutil.rmtree, "config.json: No such file"),
    "no configuration": (lambda r: (r / "config.json").unlink(), "config.json: No such file"),
    "no JSON": (lambda r: (r / "config.json").write_text("{"), "config.json: not a JSON object"),
    "another model": (
        lambda r: edit(r / "config.json", model_type="deepseek_v3"),
        "model_type='deepseek_v3': deepseek_v4 is needed (did you mean 'deepseek_v4'?)",
    ),
    "no layers": (lambda r: edit(r / "config.json", num_hidden_layers="six"), "num_hidden_layers='six'"),
    "too few layers": (lambda r: edit(r / "config.json", num_hidden_layers=4), "1 to 3 of them can be kept"),
    "no weights": (lambda r: (r / "model.safetensors.index.json").unlink(), "neither model.safetensors.index.json nor"),
    "no map": (lambda r: edit(r / "model.safetensors.index.json", weight_map=[]), "no weight_map in it"),
    "a way out": (
        lambda r: edit(r / "model.safetensors.index.json", weight_map={"embed.weight": "../x"}),
        "'../x': not the name of a file beside it",
    ),
    "a file lacks": (lambda r: (r / FIRST).unlink(), f"{FIRST}: No such file"),
    "a file cut short": (lambda r: shorten(r / FIRST), "cut short"),
    "an empty file": (lambda r: ((r / FIRST).unlink(), (r / FIRST).touch()), "cut short at 0 bytes"),
    "a pointer of git-lfs": (
        lambda r: ((r / FIRST).unlink(), (r / FIRST).write_text("version https://git-lfs.github.com/spec/v1\n")),
        "not a safetensors file",
    ),
    "a damaged header": (
        lambda r: ((r / FIRST).unlink(), (r / FIRST).write_bytes(struct.pack("<Q", 2) + b"[]")),
        "header is damaged",
    ),
    **{
        f"a header with {entry}": (
            lambda r, entry=entry: (
                (r / FIRST).unlink(),
                (r / FIRST).write_bytes(struct.pack("<Q", len(entry)) + entry.encode() + bytes(9)),
            ),
            "header is damaged",
        )
        for entry in (
            '{"__metadata__":[1]}',
            '{"embed.weight":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,8]}}',
            '{"embed.weight":{"dtype":"U8","shape":["8"],"data_offsets":[0,8]}}',
            '{"embed.weight":{"dtype":"U8","shape":[8],"data_offsets":[0,8.0]}}',
        )
    },
    "an index that lies": (
        lambda r: edit(r / "model.safetensors.index.json", weight_map={"embed.tokens": FIRST}),
        "has no tensor 'embed.tokens'",
    ),
    "no MTP": (lambda r: write_index(r, lambda name: not name.startswith("mtp.")), "--no-mtp does without"),
    "other names": (lambda r: write_index(r, lambda name: "layers" not in name), "no tensors of layer 0"),
}


def write_index(root: Path, keep: Any) -> None:
    for path in root.glob("model*"):
        path.unlink()
    write_shard(root / "model.safetensors", {name: kind for name, kind in names().items() if keep(name)})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_checkpoint_that_will_not_do_is_one_line_and_leaves_nothing(released: Path, mistake: str) -> None:
    spoil, message = MISTAKES[mistake]
    spoil(released)
    before = sorted(os.listdir(released.parent))
    with pytest.raises(UserError) as error:
        cut(released)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(os.listdir(released.parent)) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers=0"], "--layers=0"),
        (["--layers=six"], "--layers='six': not a whole number"),
        (["--layers=-1"], "not a whole number"),
        (["--out=/none/such/place"], "there is no directory /none/such"),
        (["--out=."], "exists already"),
    ],
)
def test_options_that_cannot_be(released: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cut(released, *words)


def test_no_room_is_said_before_anything_is_written(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(released)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(UserError, match=r"0\.0 GB are needed, 0\.0 GB are free"):
        cut(released)


def test_an_interruption_leaves_nothing(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dsv4kit.weights.proxy.copy_tensors", interrupt)
    before = sorted(os.listdir(released.parent))
    with pytest.raises(KeyboardInterrupt):
        cut(released)
    assert sorted(os.listdir(released.parent)) == before
