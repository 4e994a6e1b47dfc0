"""The segment script of a pyxis site, unchanged, on a real Slurm whose srun has pyxis' options (see spank_pyxis.c)."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_chain import Cluster, steps

from dsv4kit import packages
from dsv4kit.config.loading import load_settings, load_site
from dsv4kit.config.site import Site
from dsv4kit.errors import UserError
from dsv4kit.image import squashfs
from dsv4kit.launch.doctor import examine
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.submission import Submission
from dsv4kit.run.directory import RunDir
from dsv4kit.sandbox.cluster import Sandbox, SandboxSpec
from dsv4kit.sandbox.runtime import runtime_python

SOURCE = Path(__file__).with_name("spank_pyxis") / "spank_pyxis.c"
NEEDED = {"cc": "gcc", "/usr/include/slurm/spank.h": "libslurm-dev", **squashfs.PROGRAMS}


@dataclass(frozen=True)
class Task:
    """What one task of a step was given."""

    step: str
    rank: int
    options: dict[str, str]
    argv: list[str]


class Recorder:
    """A sandbox of two nodes with the plugin, and what it wrote down."""

    def __init__(self, sandbox: Sandbox, directory: Path) -> None:
        self.directory = directory / "recorded"
        self.directory.mkdir()
        plugin = directory / "spank_pyxis.so"
        warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", *warnings, "-o", plugin, SOURCE], check=True)
        # Read by srun and by slurmstepd at each start.
        sandbox.slurm_conf.with_name("plugstack.conf").write_text(f"required {plugin} {self.directory}\n")
        self.slurm = Slurm(sandbox.client_env)

    def of(self, job_id: str) -> list[Task]:
        found = []
        for path in sorted(self.directory.glob(f"{job_id}.*")):
            pairs = [line.split("=", 1) for line in path.read_text().splitlines()]
            options = {name: value for name, value in pairs if name != "argv"}
            _, step, rank = path.name.split(".")
            found.append(Task(step, int(rank), options, [value for name, value in pairs if name == "argv"]))
        return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pyxis")


@pytest.fixture(scope="module")
def two_nodes(sandbox_root: Path, directory: Path) -> Sandbox:
    try:
        packages.require(NEEDED, "the stand-in for pyxis")
    except UserError as error:
        pytest.skip(str(error))
    return Sandbox.up(SandboxSpec(name=f"pyxis-{os.getpid()}", nodes=2), share=[directory])


@pytest.fixture(scope="module")
def recorder(two_nodes: Sandbox, directory: Path) -> Recorder:
    return Recorder(two_nodes, directory)


@pytest.fixture(scope="module")
def cluster(two_nodes: Sandbox, directory: Path, recorder: Recorder) -> Iterator[Cluster]:
    runs = directory / "runs"
    runs.mkdir()
    made = Cluster(two_nodes, runs, runtime_python())
    yield made
    made.slurm.run("scancel", "--me")


@pytest.fixture(scope="module")
def site(directory: Path) -> Site:
    """The sandbox as a site with pyxis. The plugin starts no container, so the host's Python stands for the image's."""
    image = directory / "dsv4kit.sqsh"
    (directory / "empty").mkdir()
    squashfs.write(directory / "empty", image)
    tree = load_site("sandbox").model_dump()
    tree["python"] = str(runtime_python())
    tree["container"] = {"runtime": "pyxis", "image": str(image), "mounts": ["/etc/hosts:/etc/cluster-hosts:ro"]}
    return Site.model_validate(tree)


def test_the_one_srun_of_a_segment_has_the_options_pyxis_needs(
    cluster: Cluster, recorder: Recorder, site: Site
) -> None:
    run = cluster.submit("r", ("recipe.module", "stand_in_sft"), ("schedule.steps", 2), recipe="sft", site=site)
    state = cluster.wait(run)
    assert (state.state, steps(state)) == ("finished", [(0, 2)])

    tasks = recorder.of(state.segments[0].job_id)
    batch = [task for task in tasks if task.step == "batch"]
    agents = [task for task in tasks if task.step != "batch"]
    assert [task.options for task in batch] == [{}]
    assert [(task.step, task.rank) for task in agents] == [("0", 0), ("0", 1)]
    for options in (task.options for task in agents):
        assert options.keys() == {"container-image", "container-mounts", "no-container-mount-home", "container-workdir"}
        assert options["container-image"] == site.container.image
        assert options["container-image"].startswith("/")
        assert options["container-workdir"] == str(run.path)
        mounts = options["container-mounts"].split(",")
        assert "/etc/hosts:/etc/cluster-hosts:ro" in mounts
        assert f"{run.path}:{run.path}" in mounts
        # enroot starts nothing where a source is not there.
        assert [mount for mount in mounts if not Path(mount.split(":")[0]).exists()] == []
    # The payload is submitit's, with the image's own PYTHONPATH left to it.
    assert all(task.argv[:2] == ["bash", "-c"] for task in agents)
    assert all(task.argv[3:5] == ["agent", str(runtime_python())] for task in agents)
    assert agents[0].argv[-1] == str(run.segment(1).path / "submitit")


def test_a_site_that_wants_the_image_writable_says_so_to_pyxis(
    cluster: Cluster, recorder: Recorder, site: Site
) -> None:
    writable = site.model_copy(update={"container": site.container.model_copy(update={"writable": True})})
    run = cluster.submit("w", ("recipe.module", "stand_in_sft"), ("schedule.steps", 1), recipe="sft", site=writable)
    cluster.wait(run, lambda state: bool(recorder.of(state.segments[0].job_id)[1:]))
    options = recorder.of(run.chain()[0].job_id)[0].options
    cluster.slurm.run("scancel", "--me")
    assert options["container-writable"] == ""


def test_the_doctor_finds_pyxis_and_sbatch_takes_the_script(cluster: Cluster, site: Site) -> None:
    resolved = load_settings("cpu", "tiny", "sft")
    submission = Submission(resolved, site, RunDir(cluster.root / "d"), cluster.slurm, "python3", "/m", "/d")
    findings = {finding.topic: finding for finding in examine(submission)}
    assert (findings["pyxis"].level, findings["sbatch"].level) == ("ok", "ok")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--container-image=/a.sqsh", "--container-image=/b.sqsh"], "specified multiple times"),
        (["--container-image=/a.sqsh", "--container-mounts=a:/b"], "invalid source"),
        (["--container-image=/a.sqsh", "--container-mounts=/a:b"], "invalid destination"),
        (["--container-writable", "--container-readonly"], "were specified"),
        (["--container-imagine=/a.sqsh"], "unrecognized option"),
    ],
)
def test_srun_refuses_what_pyxis_refuses(
    two_nodes: Sandbox, recorder: Recorder, options: list[str], message: str
) -> None:
    env = {**os.environ, **two_nodes.client_env}
    done = subprocess.run(["srun", *options, "true"], env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr
