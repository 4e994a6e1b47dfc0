"""The batch scripts of the example sites, as text a cluster engineer reviews, and as programs."""

import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4kit.config.loading import Override, load_settings, load_site
from dsv4kit.config.site import Site
from dsv4kit.launch.export import Export
from dsv4kit.launch.render import SegmentScript, conclude_text
from dsv4kit.launch.slurm import Slurm
from dsv4kit.run.directory import RunDir
from dsv4kit.run.export import HUGGING_FACE, ExportRequest
from dsv4kit.run.node_spec import NodeSpec

HERE = Path(__file__).parent
PAYLOAD = "python3 -u -m submitit.core._submit /shared/runs/first/segments/0001/submitit"
# Example site -> what it is shown with.
EXAMPLES = {
    "example-gb200-pyxis": ("gb200", "dsv4-pro", "grpo"),
    "example-h100-pyxis": ("h100", "dsv4-flash", "sft"),
    "example-bare": ("h100", "dsv4-pro", "grpo"),
}


def script(site: Site, hardware: str, model: str, recipe: str, run: str = "/shared/runs/first") -> SegmentScript:
    paths = {
        "model.path": "/shared/models/m",
        "data.train_files": ["/shared/data/train.parquet"],
        "data.val_files": ["/shared/data/test.parquet"],
    }
    overrides = [Override(key, value, "test") for key, value in paths.items()]
    return SegmentScript(load_settings(hardware, model, recipe, overrides).settings, site, RunDir(Path(run)), 1)


def changed(name: str, **sections: object) -> Site:
    """An example site with other values, checked like one from a file."""
    tree = load_site(name).model_dump()
    for key, value in sections.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) and isinstance(tree[key], dict) else value
    return Site.model_validate(tree)


def lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_script_of_an_example_site(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"site-{name}.sbatch", script(load_site(name), *EXAMPLES[name]).render(PAYLOAD))


def test_the_script_of_an_export(golden: Callable[[str, str], None]) -> None:
    made = script(load_site("example-gb200-pyxis"), *EXAMPLES["example-gb200-pyxis"])
    spec = dataclasses.replace(
        NodeSpec.load(RunDir(HERE.parent / "data" / "run-of-03a24f3")), checkpoint_dir="/ckpts/p"
    )
    request = ExportRequest("/ckpts/p/global_step_20/actor", HUGGING_FACE, "huggingface")
    wanted = Export(made.run, 20, request, made.settings, made.site, "python3", spec, 851_000_000_000, Slurm())
    text = wanted.script().render(PAYLOAD)
    assert "  /ckpts/p:/ckpts/p" in lines(text, "  ")
    golden("export.sbatch", text)


@pytest.mark.parametrize("name", ["export.sbatch", *(f"site-{name}.sbatch" for name in [*sorted(EXAMPLES), "bwrap"])])
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, HERE / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("version", "nodes", "expected"),
    [
        ("24.05.4", 64, ["#SBATCH --segment=16"]),
        ("23.11.10", 64, []),
        (None, 64, []),
        ("25.05", 128, ["#SBATCH --segment=16"]),
    ],
)
def test_segment_is_asked_for_where_slurm_has_it(version: str | None, nodes: int, expected: list[str]) -> None:
    made = script(changed("example-gb200-pyxis", slurm={"version": version}), "gb200", "dsv4-pro", "grpo")
    made = SegmentScript(
        made.settings.model_copy(update={"schedule": made.settings.schedule.model_copy(update={"nodes": nodes})}),
        made.site,
        made.run,
        1,
    )
    text = made.render(PAYLOAD)
    assert lines(text, "#SBATCH --segment") == expected
    assert ("# No --segment=16: this Slurm" in text) == (not expected)


def test_no_number_of_nodes_that_fits_is_said_in_the_script() -> None:
    settings = script(load_site("example-gb200-pyxis"), "gb200", "dsv4-pro", "grpo").settings
    settings = settings.model_copy(update={"schedule": settings.schedule.model_copy(update={"nodes": 62})})
    text = SegmentScript(settings, load_site("example-gb200-pyxis"), RunDir(Path("/r/x")), 1).render(PAYLOAD)
    assert not lines(text, "#SBATCH --segment")
    assert "# No --segment: no number of nodes" in text


def test_everything_a_site_can_say_is_in_the_script(golden: Callable[[str, str], None]) -> None:
    site = changed(
        "example-h100-pyxis",
        slurm={
            "qos": "high",
            "reservation": "maint",
            "cpus_per_task": 64,
            "extra": ["--constraint=a&b", "--comment=x"],
        },
        container={"mounts": ["/etc/x", "/a:/b:ro"], "writable": True},
        env={"NCCL_IB_HCA": "mlx5_0,mlx5_1", "TEXT": "it's $HOME `x` \\"},
        secrets_file="/home/me/my secrets",
    )
    golden("site-everything.sbatch", script(site, "h100", "dsv4-flash", "sft").render(PAYLOAD))


def test_a_site_without_pyxis_enters_the_image_by_itself(golden: Callable[[str, str], None]) -> None:
    container = {"runtime": "bwrap", "image": "/shared/images/it's.sqsh", "mounts": ["/etc/nsswitch.conf"]}
    site = changed("example-bare", container=container, python="python3")
    golden("site-bwrap.sbatch", script(site, "h100", "dsv4-flash", "sft").render(PAYLOAD))


class Host:
    """A batch host with an `srun` that shows the containers' command line and environment, then runs the command."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        self.run = root / "runs" / "r"
        (self.run / "segments" / "0001").mkdir(parents=True)
        (self.run / "segments" / "0001" / "conclude.sh").write_text(conclude_text())
        (self.run / "kit").mkdir()
        verdict = shlex.quote(str(self.run / "segments" / "0001" / "verdict"))
        shown = shlex.quote(str(root / "srun"))
        self.command(
            "srun",
            f'printf "%s\\n" "$@" > {shown}; env -0 > {shown}.env\n'
            'while [ "${1#--}" != "$1" ]; do shift; done\n'
            f'"$@" > {shown}.out 2>&1; echo continue > {verdict}',
        )
        for name in ("scancel", "squeue", "scontrol"):
            self.command(name, f'echo "{name} $*" >> {shlex.quote(str(root / "calls"))}')

    def command(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def batch(self, site: Site, payload: str, **env: str) -> "subprocess.CompletedProcess[str]":
        text = script(site, "h100", "dsv4-flash", "sft", str(self.run)).render(payload)
        environment = {"PATH": f"{self.bin}:{os.environ['PATH']}", **env}
        return subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=20)

    @property
    def environment(self) -> dict[str, str]:
        content = (self.root / "srun.env").read_text()
        return dict(entry.split("=", 1) for entry in content.split("\0") if entry)

    @property
    def arguments(self) -> list[str]:
        return (self.root / "srun").read_text().splitlines()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_container_gets_its_mounts_and_keeps_the_images_own_python_path(host: Host) -> None:
    done = host.batch(load_site("example-h100-pyxis"), "env", PYTHONPATH="/opt/megatron")
    assert done.returncode == 0, done.stderr
    mounts = next(word for word in host.arguments if word.startswith("--container-mounts=")).partition("=")[2]
    assert mounts.split(",") == [
        "/raid:/raid",
        "/shared/data:/shared/data:ro",
        "/shared/models/m:/shared/models/m:ro",
        f"{host.run}:{host.run}",
    ]
    assert "--no-container-mount-home" in host.arguments
    assert not any(word.startswith("--container-name") for word in host.arguments)
    # The image's environment replaces the job's, PYTHONPATH included; the fake srun left it as it was.
    assert f"PYTHONPATH={host.run}/kit:/opt/megatron" in (host.root / "srun.out").read_text().splitlines()


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_secrets_reach_the_job_and_nothing_else(host: Host, mode: int) -> None:
    secrets = host.root / "secrets"
    secrets.write_text("# keys\nWANDB_API_KEY='s3cr3t $x'\nexport OTHER=two\n")
    secrets.chmod(mode)
    done = host.batch(changed("example-h100-pyxis", secrets_file=str(secrets)), "true")
    assert done.returncode == 0, done.stderr
    assert (host.environment["WANDB_API_KEY"], host.environment["OTHER"]) == ("s3cr3t $x", "two")
    assert "s3cr3t" not in " ".join(host.arguments) + done.stdout + done.stderr
    found = subprocess.run(["grep", "-rl", "s3cr3t", host.run], capture_output=True, text=True)
    assert found.stdout == ""


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o700, 0o440, None])
def test_secrets_that_others_may_read_start_nothing_and_end_the_chain(host: Host, mode: int | None) -> None:
    secrets = host.root / "it's secret"
    if mode is not None:
        secrets.write_text("KEY=x\n")
        secrets.chmod(mode)
    done = host.batch(changed("example-h100-pyxis", secrets_file=str(secrets)), "true")
    assert done.returncode == 1
    assert "it's secret: not a file of your own with mode 0600 or 0400; nothing is started" in done.stderr
    assert not (host.root / "srun").exists()
    assert "scancel --me" in (host.root / "calls").read_text()


def test_the_sites_environment_arrives_word_for_word(host: Host) -> None:
    values = {"A": 'it\'s $HOME `id` \\ "x"', "B_2": " two words "}
    host.batch(changed("example-h100-pyxis", env=values), "true")
    assert {name: host.environment[name] for name in values} == values
