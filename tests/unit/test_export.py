"""Which checkpoint is exported, what becomes of it, and what is refused before a job is submitted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import checkpoint_trees as trees
import pytest
from test_node import node_spec

from dsv4kit.cli import export as verb
from dsv4kit.errors import UserError
from dsv4kit.launch import export as launch
from dsv4kit.node import export as node
from dsv4kit.run import export
from dsv4kit.run.directory import RunDir
from dsv4kit.run.export import ExportRequest
from dsv4kit.run.node_spec import NodeSpec

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def huggingface(directory: Path) -> Path:
    """A model as a merger leaves it: two shards, their index, config and tokenizer."""
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in shards:
        trees.write(directory / name, trees.safetensors_bytes())
    trees.write(directory / "model.safetensors.index.json", {"weight_map": dict(zip("ab", shards, strict=True))})
    trees.write(directory / "config.json", {"model_type": "qwen2"})
    trees.write(directory / "tokenizer.json", {"version": "1.0"})
    return directory


def test_weights_that_megatron_bridge_wrote_are_taken_over_whole(tmp_path: Path) -> None:
    source = huggingface(tmp_path / "actor" / "huggingface")
    trees.write(source / "chat_template.jinja", "the checkpoint's own")
    request = ExportRequest(str(tmp_path / "actor"), export.HUGGING_FACE, "huggingface", TEMPLATE)
    node.convert(request, tmp_path / "model")
    made = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert made.pop("chat_template.jinja").decode() == TEMPLATE
    assert made == {path.name: path.read_bytes() for path in source.iterdir() if path.name != "chat_template.jinja"}
    assert (source / "chat_template.jinja").read_text() == "the checkpoint's own"
    assert not (tmp_path / "model.partial").exists()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda d: (d / "model-00002-of-00002.safetensors").unlink(), "model-00002-of-00002.safetensors is missing"),
        (lambda d: trees.write(d / "model-00001-of-00002.safetensors", trees.safetensors_bytes()[:-1]), "its header"),
        (lambda d: trees.write(d / "config.json", "{"), "config.json is missing or cut short"),
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer: none of tokenizer.json"),
    ],
)
def test_what_is_not_whole_never_gets_the_name_of_a_model(harm: object, said: str, tmp_path: Path) -> None:
    harm(huggingface(tmp_path / "actor" / "huggingface"))  # type: ignore[operator]
    with pytest.raises(node.ExportFailedError) as failed:
        node.convert(ExportRequest(str(tmp_path / "actor"), export.HUGGING_FACE, "huggingface"), tmp_path / "model")
    assert said in str(failed.value)
    assert not (tmp_path / "model").exists()


def test_a_merger_that_fails_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "merge_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(node.ExportFailedError, match=r"verl.model_merger ended with status 3"):
        node.convert(ExportRequest(str(tmp_path), export.FSDP, ""), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def step(spec: NodeSpec, number: int) -> Path:
    from stand_in_trainer import save

    save(Path(spec.checkpoint_dir), number, ranks=2)
    return Path(spec.checkpoint_dir) / f"global_step_{number}"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeSpec:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "stand_in"))
    return node_spec(tmp_path)


def test_the_newest_complete_checkpoint_is_taken_unless_a_step_is_named(spec: NodeSpec, tmp_path: Path) -> None:
    run, directory = RunDir(tmp_path / "r"), Path(spec.checkpoint_dir)
    with pytest.raises(UserError, match="RUN=r: no complete checkpoint in"):
        launch.chosen(run, directory, None)
    for number in (2, 4, 6):
        step(spec, number)
    (directory / "global_step_6" / "actor" / "model_world_size_2_rank_1.pt").unlink()
    assert launch.chosen(run, directory, None).step == 4
    assert launch.chosen(run, directory, 2).step == 2
    with pytest.raises(UserError, match=r"STEP=3: no checkpoint of that step .*; complete are: 2, 4"):
        launch.chosen(run, directory, 3)
    with pytest.raises(UserError, match=r"STEP=6: its checkpoint is not whole: actor/model_world_size_2_rank_1.pt is"):
        launch.chosen(run, directory, 6)


def test_shards_of_fsdp_go_to_verls_merger(spec: NodeSpec, tmp_path: Path) -> None:
    made = step(spec, 2)
    state = launch.chosen(RunDir(tmp_path / "r"), Path(spec.checkpoint_dir), 2)
    request = launch.requested(state, None)
    assert request == ExportRequest(str(made / "actor"), export.FSDP, "")
    words = node.merge_command(made / "actor", tmp_path / "out")
    assert words[1:6] == ["-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    place = export.place(RunDir(tmp_path / "r"), 2)
    export.write(place, request)
    assert export.load(place) == request


@pytest.mark.parametrize(
    ("contents", "weights"),
    [
        ({"model": {"path": "huggingface", "format": "huggingface"}}, "huggingface"),
        (
            {
                "model": {"path": "model/dist_ckpt", "format": "megatron_dist_checkpoint"},
                "hf_model": {"path": "huggingface", "format": "huggingface"},
            },
            "huggingface",
        ),
        ({"model": {"path": "model/dist_ckpt", "format": "megatron_dist_checkpoint"}}, None),
    ],
)
def test_of_megatron_what_its_manifest_names(contents: dict[str, object], weights: str | None, tmp_path: Path) -> None:
    from dsv4kit.checkpoint.inspection import CheckpointLayout, StepState

    trees.write(tmp_path / "global_step_2" / "actor" / "ckpt_contents.json", json.dumps({"contents": contents}))
    state = StepState(2, tmp_path / "global_step_2", CheckpointLayout.PPO_MEGATRON)
    if weights is None:
        with pytest.raises(UserError, match=r"Megatron's own shards alone.*contents=\[model,hf_model,extra\]"):
            launch.requested(state, None)
    else:
        assert launch.requested(state, "t") == ExportRequest(
            str(tmp_path / "global_step_2" / "actor"), export.HUGGING_FACE, weights, "t"
        )


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_a_step_is_a_whole_number(text: str) -> None:
    with pytest.raises(UserError, match="not a whole number above 0"):
        verb.step_of(text)
