"""The doctor's findings, the facts of a node, and how both are shown. The job itself is tested on a real cluster."""

import getpass
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dsv4kit.cli.doctor import node_table, summary
from dsv4kit.config.loading import Override, load_settings, load_site
from dsv4kit.config.site import Site
from dsv4kit.errors import UserError
from dsv4kit.feasibility.case import ImageFacts
from dsv4kit.launch import doctor
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.submission import Submission
from dsv4kit.node import bandwidth, inventory, preflight
from dsv4kit.run.directory import RunDir
from dsv4kit.run.node_files import NodeReport

USER = getpass.getuser()
PARTITION = "PartitionName=batch AllowGroups=ALL MaxTime=2:00:00 MaxNodes=32 State=UP TotalNodes=80"


class FakeSlurm(Slurm):
    """Answers of a cluster; an answer that is an exception is raised."""

    def __init__(self, **answers: str | UserError) -> None:
        super().__init__()
        self.answers = {
            "sbatch --version": "slurm 24.05.4",
            "scontrol ping": "Slurmctld(primary) at ctl is UP",
            "srun --help": "  --container-image=...",
            "sbatch --help": "  --segment=...",
            "scontrol show partition": PARTITION,
            "sinfo": "\n".join(f"dsv4kit|n{i}|idle|batch*" for i in range(80)),
            "sacctmgr": f"{USER}|team\n{USER}|other\n",
            "sbatch --parsable": "",
            **{key.replace("_", " ").replace("  ", " --"): value for key, value in answers.items()},
        }

    def run(self, *command: str) -> str:
        line = " ".join(command)
        key = max((key for key in self.answers if line.startswith(key)), key=len)
        answer = self.answers[key]
        if isinstance(answer, UserError):
            raise answer
        return answer


def submission(tmp_path: Path, slurm: Slurm, site: Site | None = None, *changes: tuple[str, Any]) -> Submission:
    made = site or load_site("example-gb200-pyxis")
    slurm_section = made.slurm.model_copy(update={"partition": "batch", "account": "team"})
    image = tmp_path / "image.sqsh"
    image.write_bytes(b"hsqs" + bytes(1000))
    container = made.container.model_copy(update={"image": str(image)})
    made = made.model_copy(update={"slurm": slurm_section, "container": container})
    overrides = [Override("model.path", "/m", "MODEL_PATH"), *(Override(key, value, "test") for key, value in changes)]
    resolved = load_settings("gb200", "dsv4-pro", "grpo", overrides)
    return Submission(resolved, made, RunDir(tmp_path / "runs" / "r"), slurm, "python3")


def found(tmp_path: Path, slurm: Slurm, *changes: tuple[str, Any], site: Site | None = None) -> dict[str, str]:
    """Topic -> its findings other than `ok`, as text."""
    lines: dict[str, str] = {}
    for finding in doctor.examine(submission(tmp_path, slurm, site, *changes)):
        if finding.level != "ok":
            lines[finding.topic] = f"{lines.get(finding.topic, '')}{finding.level}: {finding.text}\n"
    return lines


def test_the_sandboxs_nodes_see_every_file_system_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_output", lambda *_: "ext2/ext3\n")
    for site, level in (("example-gb200-pyxis", "warning"), ("sandbox", "ok")):
        (finding,) = doctor.shared(submission(tmp_path, FakeSlurm(), load_site(site)))
        assert finding.level == level


PATCHES = [
    {"patch": "no-grad main parameters", "required": True, "state": "applied", "detail": ""},
    {"patch": "MTP tolerates extra arguments", "required": False, "state": "failed", "detail": "AttributeError: x"},
]


def test_the_patches_that_apply_in_the_image_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = {"stack": "pro-grpo", "patches": PATCHES, "needs": []}
    inside |= {"features": {"contains": {"verl": ["0bd668c"]}}}
    monkeypatch.setattr(doctor.image_rules, "refused", lambda *_: [])
    monkeypatch.setattr(doctor.fit, "inside", lambda path: ImageFacts(path, "aarch64", inside, 1))
    findings = list(doctor.image(submission(tmp_path, FakeSlurm())))
    assert [(finding.level, finding.topic, finding.text) for finding in findings[1:]] == [
        ("ok", "patch", "no-grad main parameters: applied"),
        ("warning", "patch", "MTP tolerates extra arguments: failed (AttributeError: x)"),
    ]


class TestLoginNode:
    def test_limits_of_the_partition_are_held_against_the_run(self, tmp_path: Path) -> None:
        said = found(tmp_path, FakeSlurm())["partition"]
        assert "problem: 64 nodes are asked for, a job may have 32" in said
        assert "problem: TIME=14:00:00 is above its MaxTime" in said
        said = found(tmp_path, FakeSlurm(sinfo="dsv4kit|n1|idle|batch*\ndsv4kit|n2|down|batch*"))["partition"]
        assert "problem: 64 nodes are asked for, 2 can be had" in said

    def test_nodes_that_are_drained_now_are_waited_for(self, tmp_path: Path) -> None:
        nodes = [f"dsv4kit|n{i}|{'drained' if i else 'idle'}|batch*" for i in range(64)]
        said = found(tmp_path, FakeSlurm(sinfo="\n".join(nodes)))["partition"]
        assert "warning: 64 nodes are asked for; of 64, 1 are neither down nor drained now" in said

    def test_notices_of_the_site_are_no_answers(self, tmp_path: Path) -> None:
        notice = "Maintenance on 1 Dec 2026\n"
        answers = FakeSlurm().answers.items()
        said = FakeSlurm()
        said.answers = {key: notice + value if isinstance(value, str) else value for key, value in answers}
        assert found(tmp_path, said) == found(tmp_path, FakeSlurm())
        nothing = FakeSlurm()
        nothing.answers = dict.fromkeys(nothing.answers, notice)
        assert "names no version of Slurm" in found(tmp_path, nothing)["slurm"]

    def test_a_partition_without_limits_has_none(self, tmp_path: Path) -> None:
        free = PARTITION.replace("2:00:00", "UNLIMITED").replace("MaxNodes=32", "MaxNodes=UNLIMITED")
        assert "partition" not in found(tmp_path, FakeSlurm(scontrol_show_partition=free))

    def test_where_slurm_does_not_answer_it_is_asked_once(self, tmp_path: Path) -> None:
        said = found(tmp_path, FakeSlurm(sbatch__version=UserError("sbatch failed: no config")))
        assert said["slurm"] == "problem: sbatch failed: no config\n"
        assert not {"options", "partition", "account", "sbatch"} & said.keys()

    def test_what_slurm_lacks_is_named(self, tmp_path: Path) -> None:
        said = found(tmp_path, FakeSlurm(srun__help="", sbatch__help=""))
        assert "pyxis is not installed here" in said["pyxis"]
        assert "would refuse the script" in said["--segment"]
        said = found(tmp_path, FakeSlurm(sbatch__version="slurm 25.05.1"))
        assert "slurm.version of the site says 24.05.4" in said["slurm"]

    def test_an_option_that_is_there_and_not_used_is_a_pity(self, tmp_path: Path) -> None:
        site = load_site("example-gb200-pyxis")
        site = site.model_copy(update={"slurm": site.slurm.model_copy(update={"version": None})})
        assert "sbatch has it" in found(tmp_path, FakeSlurm(), site=site)["--segment"]

    def test_the_account_is_one_of_the_users(self, tmp_path: Path) -> None:
        assert "'team' is none of" in found(tmp_path, FakeSlurm(sacctmgr=f"{USER}|other\n"))["account"]
        assert "account" not in found(tmp_path, FakeSlurm(sacctmgr=UserError("no accounting")))

    def test_what_sbatch_says_to_the_script_is_passed_on(self, tmp_path: Path) -> None:
        refused = FakeSlurm(**{"sbatch__parsable": UserError("sbatch failed: Invalid qos specification")})
        assert "Invalid qos" in found(tmp_path, refused)["sbatch"]

    def test_checkpoints_need_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = type("Usage", (), {"free": 1e12})
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
        assert found(tmp_path, FakeSlurm())["space"].startswith("problem: 1.0 TB free; 20 checkpoints of 0.8")
        usage.free = 5e12
        assert found(tmp_path, FakeSlurm())["space"].startswith("warning")
        usage.free = 50e12
        assert "space" not in found(tmp_path, FakeSlurm())

    @pytest.mark.parametrize(
        ("text", "left"),
        [
            ("/lustre 1000 0 3000 - 5 0 0 -", 2000 * 1024),
            ("/lustre 1000* 800 0 - 5 0 0 -", -200 * 1024),
            ("/lustre 1000 0 0 - 5 0 0 -", None),
            ("", None),
            ("Permission denied", None),
        ],
    )
    def test_what_is_left_of_a_quota(self, text: str, left: float | None) -> None:
        assert doctor.quota_left(text) == left


NVIDIA_SMI = """
GPU 00000000:09:00.0
    Fabric
        State                             : Completed
        Status                            : Success
    Clocks
        State : x
GPU 00000000:0A:00.0
    Fabric
        State                             : In Progress
"""


class TestNode:
    def meminfo(self, root: Path, node: int, total: int, free: int, cache: int, shmem: int = 0) -> None:
        values = {"MemTotal": total, "MemFree": free, "FilePages": cache, "Shmem": shmem, "SReclaimable": 0}
        path = root / f"node{node}" / "meminfo"
        path.parent.mkdir(parents=True)
        path.write_text("".join(f"Node {node} {name}:  {value} kB\n" for name, value in values.items()))

    def test_memory_of_gpus_is_no_memory_of_the_host(self, tmp_path: Path) -> None:
        self.meminfo(tmp_path, 0, 1000, 300, 500, shmem=100)
        self.meminfo(tmp_path, 1, 1000, 900, 0)
        self.meminfo(tmp_path, 2, 9000, 9000, 0)  # a GPU's, on GB200
        (tmp_path / "meminfo").write_text("MemAvailable: 10500 kB\n")
        assert inventory.memory_available([0, 1], tmp_path / "meminfo", tmp_path) == 1600 * 1024
        assert inventory.memory_available([0, 1, 2], tmp_path / "meminfo", tmp_path) == 10500 * 1024
        assert inventory.memory_available([], tmp_path / "meminfo", tmp_path) == 10500 * 1024

    def test_gpus_as_the_driver_shows_them(self) -> None:
        cards = inventory.parse_gpus("NVIDIA H100, 80GB, 81559, 1, 0\nNVIDIA H100, 80GB, 81559, 40000, [N/A]\n")
        assert [card.name for card in cards] == ["NVIDIA H100, 80GB"] * 2
        assert [card.uncorrected_errors for card in cards] == [0, None]
        assert preflight._driver(2, cards) == ["GPU 1 (NVIDIA H100, 80GB): 40000 of 81559 MiB are in use already"]
        assert preflight._driver(4, cards[:1]) == ["1 GPUs shown by nvidia-smi, 4 needed"]
        assert "nvidia-smi" in preflight._driver(4, None)[0]

    def test_the_fabric_has_a_state_per_gpu(self) -> None:
        assert inventory.parse_fabric(NVIDIA_SMI) == "Completed, In Progress"
        assert inventory.parse_fabric("GPU\n    Fabric\n        State : N/A\n") == ""

    def test_a_channel_is_a_must_only_where_nccl_is_told_so(self) -> None:
        assert preflight._fabric({"NCCL_MNNVL_ENABLE": "2"}, 0) == []
        assert preflight._fabric({"NCCL_MNNVL_ENABLE": "1"}, 1) == []
        assert "no IMEX channel" in preflight._fabric({"NCCL_MNNVL_ENABLE": "1"}, 0)[0]

    def test_the_facts_of_this_machine_can_be_written_down(self, tmp_path: Path) -> None:
        facts = inventory.facts(str(tmp_path))
        assert facts["gpus"] == "none" or os.path.exists("/dev/nvidia0")
        assert asdict(NodeReport("n", "a", facts=facts))["facts"] == facts

    def test_bus_bandwidth_is_that_of_a_link(self) -> None:
        assert bandwidth.all_reduce_factor(2) == 1
        assert bandwidth.all_reduce_factor(8) == 1.75
        assert bandwidth.all_to_all_factor(4) == 0.75


def test_the_table_has_a_line_per_node_and_its_problems() -> None:
    facts = {"memory_gb": {"0": 480.0, "1": 480.0}, "gpus": "4 x GB200", "infiniband": {"a/1": "4: ACTIVE, 400"}}
    facts |= {"imex_channels": 1, "fabric": "Completed", "versions": {"verl": "0.9.1"}}
    reports = [NodeReport("n1", "a", facts=facts), NodeReport("n2", "b", ["/dev/shm: too small", "x"], facts=facts)]
    measured = {"ranks": 8, "device": "cuda", "all_reduce_gb_s": 612.4, "all_to_all_gb_s": 98.5}
    measured["nodes"] = {"n1": {"inside_gb_s": 700.0, "to_next_gb_s": None}}
    lines = node_table(reports, measured).splitlines()
    assert lines[1].split("  ")[0] == "n1"
    assert "480 + 480" in lines[1]
    assert "1 Completed" in lines[1]
    assert "1 of 1 up" in lines[1]
    assert lines[1].endswith("700     -        none")
    assert lines[2].endswith("/dev/shm: too small; x")
    said = summary(reports, measured)
    assert said[0] == "versions: verl 0.9.1"
    assert "over 8 ranks (cuda): all-reduce 612 GB/s, all-to-all 98.5 GB/s" in said[1]
    other = NodeReport("n3", "c", facts={"versions": {"verl": "0.9.0"}})
    assert "different versions" in summary([*reports, other], {})[0]
