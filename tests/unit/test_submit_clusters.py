"""`submit --dry-run` for clusters that are not at hand, the names upstream's users know, and images."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dsv4kit.cli import main, variables
from dsv4kit.cli.selection import overrides_of
from dsv4kit.config.loading import load_settings
from dsv4kit.feasibility import image_rules
from dsv4kit.image import contents, fit

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site of which nothing is there."""
    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path / "runs"))
    text = (ROOT / "slurm" / "sites" / "sandbox.yaml").read_text()
    path = tmp_path / "site.yaml"
    path.write_text(text.replace("name: sandbox", "name: far").replace("python: null", "python: /usr/bin/python3"))
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["--hw=gb200", "--nodes=64"],
        ["--hw=h100", "--nodes=64"],
        ["--hw=h100", "--model=dsv4-flash", "--recipe=sft"],
    ],
)
def test_a_dry_run_needs_no_cluster_no_weights_and_no_data(
    site: Path, capsys: pytest.CaptureFixture[str], words: list[str], tmp_path: Path
) -> None:
    assert main.run(["submit", *words, f"--site={site}", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("# to be set before this can be submitted: MODEL_PATH, TRAIN_FILE")
    assert "#SBATCH --nodes=" in out
    assert "plan: it fits: GPU: " in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("version", "hinted"), [("24.05.4", False), ("23.02.7", True)])
def test_slurm_segment_is_a_note_only_where_the_script_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str, hinted: bool
) -> None:
    monkeypatch.setenv("DSV4KIT_RUNS", str(tmp_path / "runs"))
    text = (ROOT / "slurm" / "sites" / "example-gb200-pyxis.yaml").read_text()
    path = tmp_path / "site.yaml"
    path.write_text(text.replace("24.05.4", version))
    words = ["--hw=gb200", "--nodes=64", f"--site={path}"]
    assert main.run(["submit", *words, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert ("\n#SBATCH --segment=16\n" in out) is not hinted
    assert ("plan: note: ask Slurm for --segment=16" in err) is hinted
    main.run(["plan", *words])
    assert ("ask Slurm for --segment=16" in " ".join(capsys.readouterr().out.split())) is hinted


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["dsv4kit", *words])
    assert main.main() == 2
    err = capsys.readouterr().err.splitlines()
    return err[-1]


def test_what_has_to_be_set_is_named_one_after_the_other(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["submit", "--hw=h100", "--model=dsv4-flash", f"--site={site}"]
    assert "MODEL_PATH: not set; dsv4-flash needs the directory" in refused(capsys, monkeypatch, *words)
    words += [f"--model-path={tmp_path}"]
    assert "is not a model in Hugging Face form" in refused(capsys, monkeypatch, *words)
    (tmp_path / "config.json").write_text("{}")
    assert "model_type=None: deepseek_v4 is needed" in refused(capsys, monkeypatch, *words)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    assert "TRAIN_FILE: not set" in refused(capsys, monkeypatch, *words)
    words += [f"--train-file={DATA / 'grpo.parquet'}"]
    assert "TEST_FILE: not set" in refused(capsys, monkeypatch, *words)
    words[-1] = f"--train-file={DATA / 'sft.parquet'}"
    assert "GRPO needs a column `prompt`" in refused(capsys, monkeypatch, *words)
    words[-1] = f"--dist-ckpt-path={tmp_path / 'none'}"
    assert "DIST_CKPT_PATH=" in refused(capsys, monkeypatch, *words)


UPSTREAM = {
    "DIST_CKPT_PATH": ("/shards", "checkpoint.dist_checkpoint_path", "/shards"),
    "PRECISION_AWARE_OPTIMIZER": ("True", "optimizer.precision_aware", True),
    "SAVE_FREQ": ("10", "schedule.save_freq", 10),
    "ROUTER_REPLAY_MODE": ("R2", "rollout.router_replay", "R2"),
    "LOGGER": ('["console","wandb"]', "loggers", ["console", "wandb"]),
    "ROLLOUT_MOE_BACKEND": ("none", "kernels.moe_backend", None),
    "OPTIMIZER_OFFLOAD_FRACTION": ("0.5", "optimizer.offload_fraction", 0.5),
    "MODEL_PATH": ("/weights", "model.path", "/weights"),
    "TRAIN_FILE": ("/a.parquet", "data.train_files", ["/a.parquet"]),
    "TEST_FILE": ("[/a.parquet,/b.parquet]", "data.val_files", ["/a.parquet", "/b.parquet"]),
    "MAX_PROMPT_LENGTH": ("1024", "data.max_prompt_length", 1024),
    "MAX_RESPONSE_LENGTH": ("4096", "data.max_response_length", 4096),
    "TRAIN_BATCH_SIZE": ("16", "data.train_batch_size", 16),
    "ROLLOUT_N": ("16", "rollout.n", 16),
    "ROLLOUT_TP": ("2", "rollout.tensor_model_parallel_size", 2),
    "ACTOR_PP": ("32", "parallel.actor.pipeline_parallel_size", 32),
    "ACTOR_EP": ("8", "parallel.actor.expert_parallel_size", 8),
    "TOTAL_TRAINING_STEPS": ("80", "schedule.steps", 80),
    "PROJECT_NAME": ("v4", "tracking.project", "v4"),
    "EXPERIMENT_NAME": ("first", "tracking.experiment", "first"),
    "CKPTS_DIR": ("/checkpoints", "checkpoint.directory", "/checkpoints"),
    "VERL_MEGATRON_OPTIMIZER_COMPAT": ("0", "env.VERL_MEGATRON_OPTIMIZER_COMPAT", "0"),
    "CHAT_TEMPLATE_FILE": ("/t.jinja", "model.chat_template_file", "/t.jinja"),
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_p4_upstreams_names_are_make_variables_and_options(name: str) -> None:
    text, key, value = UPSTREAM[name]
    environ = {variables.NAMES: name, f"DSV4KIT_MAKE_{name}": text}
    options = variables.options_from_make("submit", environ)
    assert options == [f"--{name.lower().replace('_', '-')}={text}"]
    args = main.build_parser().parse_args(["submit", *options])
    found = load_settings("gb200", "dsv4-pro", "grpo", overrides_of(args))
    here: object = found.settings
    for part in key.split("."):
        here = here[part] if isinstance(here, dict) else getattr(here, part)
    assert here == value
    assert found.sources[key] == f"{name}={text}"


def test_a_logger_list_may_be_written_with_commas() -> None:
    args = main.build_parser().parse_args(["submit", "--logger=console, tensorboard"])
    assert overrides_of(args)[0].value == ["console", "tensorboard"]


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image, and a stand-in for squashfs-tools that shows the first bytes of an Arm program in it."""
    path = tmp_path / "image.sqsh"
    path.write_bytes(b"hsqs" + bytes(92))
    tool = tmp_path / "bin" / "unsquashfs"
    tool.parent.mkdir()
    tool.write_text(
        '#!/bin/sh\n[ "$1 $3" = "-cat usr/bin/bash" ] || exit 1\n'
        'printf "\\177ELF\\002\\001\\001\\000\\000\\000\\000\\000\\000\\000\\000\\000\\003\\000\\267\\000more"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    return path


def test_an_image_for_another_cpu_is_refused(image: Path) -> None:
    assert contents.architecture(str(image)) == "aarch64"
    h100 = load_settings("h100", "dsv4-pro", "grpo").settings
    gb200 = load_settings("gb200", "dsv4-pro", "grpo").settings
    facts = fit.inside(str(image))
    assert "built for aarch64, and h100 is x86_64" in next(image_rules.refused(facts, h100)).line
    assert not list(image_rules.refused(facts, gb200))


def test_an_image_nobody_can_look_into_is_not_refused(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/none")
    assert fit.seen(str(image)) is None
