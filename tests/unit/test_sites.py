"""What a site may say, and what follows from it: mounts, files, the environment of the nodes."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4kit.config.loading import SITES, Override, load_settings, load_site, names
from dsv4kit.config.schema import Settings
from dsv4kit.errors import UserError
from dsv4kit.feasibility import site_files
from dsv4kit.launch import mounts
from dsv4kit.launch.segment_option import knows_segment
from dsv4kit.launch.slurm import Slurm
from dsv4kit.launch.submission import Submission
from dsv4kit.run.directory import RunDir


def site_file(tmp_path: Path, **changes: Any) -> str:
    """An example site with changed keys (`section__key`), as a file of the user's."""
    tree = yaml.safe_load((SITES / "example-h100-pyxis.yaml").read_text())
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (tree[section] if section else tree)[name] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.mark.parametrize("name", names("sites"))
def test_every_site_in_the_repository_is_valid(name: str) -> None:
    assert load_site(name).name == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"container__image": "dsv4kit.sqsh"},
            "container.image='dsv4kit.sqsh'.*pyxis would look for this in a registry",
        ),
        ({"container__image": "nvcr.io#nvidia/pytorch:26.04-py3"}, "would look for this in a registry"),
        ({"container__image": "/images/dsv4kit.tar"}, "not a squashfs file by its name"),
        ({"container__image": None}, "container.image=None: .*runtime pyxis needs an image"),
        ({"container__mounts": ["data:/data"]}, "not an absolute path"),
        ({"container__mounts": ["/a b"]}, "a path with ' ' cannot be mounted"),
        ({"container__mounts": ["/a,/b"]}, "a path with ',' cannot be mounted"),
        ({"container__mounts": ["/a:/b:rw:x"]}, "not SRC, SRC:DST or SRC:DST:FLAGS"),
        ({"container__runtime": "docker"}, "container.runtime='docker'"),
        ({"slurm__partition": "batch --account=x"}, "not a name of Slurm's"),
        ({"slurm__account": "a\n#SBATCH --uid=0"}, "not a name of Slurm's"),
        ({"slurm__reservation": "$(id)"}, "not a name of Slurm's"),
        ({"slurm__extra": ["--comment=a\n#SBATCH --nodes=1"]}, "control characters and line breaks"),
        ({"slurm__extra": ["nodes=1"]}, "not an sbatch option"),
        ({"slurm__version": "latest"}, "not a version of Slurm"),
        ({"slurm__segment": 16}, "slurm.segment: no such key"),
        ({"scratch_dir": "scratch"}, "not an absolute path"),
        ({"secrets_file": "~/secrets"}, "not an absolute path"),
        ({"env": {"A-B": "x"}}, "not the name of an environment variable"),
        ({"env": {"A": "x\ny"}}, "control characters and line breaks"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_site(site_file(tmp_path, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("version", "known"), [(None, False), ("22.05.8", False), ("23.11", False), ("24.05", True), ("25.05.1", True)]
)
def test_options_follow_the_version(version: str | None, known: bool) -> None:
    assert knows_segment(version) is known


def settings(**paths: Any) -> Settings:
    base = {"model.path": "/m", "data.train_files": ["/d/t.parquet"], "data.val_files": ["/d/v.parquet"], **paths}
    return load_settings(
        "h100", "dsv4-flash", "grpo", [Override(key, value, "t") for key, value in base.items()]
    ).settings


class TestMounts:
    def of(self, tmp_path: Path, run: str = "/runs/x", site: dict[str, Any] | None = None, **paths: Any) -> list[str]:
        found = load_site(site_file(tmp_path, **{"scratch_dir": "/tmp", **(site or {})}))
        return mounts.of(settings(**paths), found, RunDir(Path(run)))

    def test_what_a_run_reads_is_read_only_and_what_it_writes_is_not(self, tmp_path: Path) -> None:
        found = self.of(tmp_path, **{"checkpoint.directory": "/ckpt/x", "checkpoint.dist_checkpoint_path": "/dist"})
        assert found == ["/ckpt/x:/ckpt/x", "/d:/d:ro", "/dist:/dist:ro", "/m:/m:ro", "/runs/x:/runs/x"]

    def test_what_lies_below_a_mount_needs_none_of_its_own(self, tmp_path: Path) -> None:
        found = self.of(tmp_path, run="/all/runs/x", site={"container__mounts": ["/all"]}, **{"model.path": "/all/m"})
        assert found == ["/all:/all", "/d:/d:ro"]

    def test_a_read_only_mount_above_is_not_enough_to_write_to(self, tmp_path: Path) -> None:
        found = self.of(tmp_path, run="/all/runs/x", site={"container__mounts": ["/all:/all:ro"]})
        assert found == ["/all:/all:ro", "/all/runs/x:/all/runs/x", "/d:/d:ro", "/m:/m:ro"]

    def test_a_mount_under_another_name_covers_nothing(self, tmp_path: Path) -> None:
        assert "/m:/m:ro" in self.of(tmp_path, site={"container__mounts": ["/m:/elsewhere"]})

    def test_links_are_followed(self, tmp_path: Path) -> None:
        blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "1"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (blobs / "abc").write_text("weights")
        (snapshot / "model.safetensors").symlink_to(blobs / "abc")
        (tmp_path / "model").symlink_to(snapshot)
        found = self.of(tmp_path, **{"model.path": str(tmp_path / "model")})
        assert {f"{path}:{path}:ro" for path in (blobs, snapshot, tmp_path / "model")} <= set(found)

    def test_a_path_that_cannot_be_mounted_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"'/runs/a b': a path with ' ' cannot be mounted"):
            self.of(tmp_path, run="/runs/a b")


class TestFiles:
    def test_an_image_is_a_squashfs(self, tmp_path: Path) -> None:
        (tmp_path / "a.sqsh").write_bytes(b"hsqs" + bytes(100))
        (tmp_path / "b.sqsh").write_bytes(b"not one")
        assert not list(site_files.image_problems(str(tmp_path / "a.sqsh")))
        assert "no squashfs" in next(site_files.image_problems(str(tmp_path / "b.sqsh")))
        assert "No such file" in next(site_files.image_problems(str(tmp_path / "c.sqsh")))

    def test_an_image_that_is_not_whole_or_no_file_is_refused(self, tmp_path: Path) -> None:
        used = 4096
        whole = b"hsqs" + bytes(36) + used.to_bytes(8, "little") + bytes(used - 48)
        (tmp_path / "a.sqsh").write_bytes(whole + bytes(100))
        assert not list(site_files.image_problems(str(tmp_path / "a.sqsh")))
        for size in (used - 1, 96, 95, 4):
            (tmp_path / "a.sqsh").write_bytes(whole[:size])
            assert f"IMAGE: '{tmp_path}/a.sqsh': cut short: {size} of " in next(
                site_files.image_problems(str(tmp_path / "a.sqsh"), "IMAGE")
            )
        os.mkfifo(tmp_path / "b.sqsh")  # to open it would wait for a writer
        for name in ("b.sqsh", "."):
            assert "not a regular file" in next(site_files.image_problems(str(tmp_path / name)))

    def test_secrets_are_for_their_owner_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "secrets"
        path.write_text("A=b")
        path.chmod(0o640)
        assert "its mode is 0640, not 0600" in next(site_files.secrets_problems(str(path)))
        path.chmod(0o400)
        assert list(site_files.secrets_problems(str(path))) == []
        path.chmod(0o600)
        assert not list(site_files.secrets_problems(str(path)))
        (tmp_path / "link").symlink_to(path)
        assert "not a regular file" in next(site_files.secrets_problems(str(tmp_path / "link")))


def test_the_sites_environment_wins_over_the_profiles_and_the_users_over_both(tmp_path: Path) -> None:
    site = load_site(
        site_file(tmp_path, env={"NCCL_NVLS_ENABLE": "1", "NCCL_IB_HCA": "mlx5", "NCCL_GRAPH_REGISTER": "1"})
    )
    overrides = [
        Override("model.path", "/m", "MODEL_PATH"),
        Override("env.NCCL_GRAPH_REGISTER", "7", "SET env.NCCL_GRAPH_REGISTER"),
    ]
    resolved = load_settings("h100", "dsv4-flash", "grpo", overrides)
    env = Submission(resolved, site, RunDir(tmp_path / "r"), Slurm(), "python3").node_spec().env
    assert (env["NCCL_NVLS_ENABLE"], env["NCCL_IB_HCA"], env["NCCL_GRAPH_REGISTER"]) == ("1", "mlx5", "7")
