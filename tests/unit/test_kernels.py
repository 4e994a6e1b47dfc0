"""Compiled kernels go from one segment to the next: each file once, whole or not at all, and never somebody else's."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import tarfile
from pathlib import Path

import pytest
from test_node import node_spec

from dsv4kit.config.loading import Override, load_settings, load_site
from dsv4kit.launch import changes
from dsv4kit.launch import kernels as told
from dsv4kit.node.attempt import Attempt
from dsv4kit.node.kernel_cache import KernelCache
from dsv4kit.node.kernel_exchange import KernelExchange
from dsv4kit.node.scratch import Scratch
from dsv4kit.run import kernels
from dsv4kit.run.directory import RunDir
from dsv4kit.run.kernels import BrokenBundleError, KernelFiles
from dsv4kit.run.node_spec import KernelCaches

ASKED = KernelCaches("key", {"TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}, 1000)


def cache(tmp_path: Path, node: str = "node1", asked: KernelCaches = ASKED) -> KernelCache:
    scratch = Scratch(tmp_path / node / "kernels-01234567")
    scratch.path.parent.mkdir(exist_ok=True)
    scratch.claim_empty()
    return KernelCache(asked, tmp_path / "shared", scratch)


def compile_kernel(of: KernelCache, name: str, content: str = "machine code") -> Path:
    path = Path(of.environment({})["TRITON_CACHE_DIR"], name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_what_was_compiled_is_there_in_the_next_segment_with_mode_and_time(tmp_path: Path) -> None:
    first = cache(tmp_path)
    made = compile_kernel(first, "HASH/kernel.so")
    made.chmod(0o755)
    os.utime(made, (1000, 1000))
    assert first.keep(first.new(), "0001-0-node1.tar.gz") == 1
    first.remove()
    assert not made.exists()

    second = cache(tmp_path)
    (line,) = second.restore()
    assert line.startswith("1 files of kernels (0.0 MB) compiled before")
    assert made.read_text() == "machine code"
    assert made.stat().st_mode & 0o777 == 0o700
    assert made.stat().st_mtime == 1000
    assert second.new() == {}
    assert second.restore() == []  # once per job: a second attempt has what the first left


def test_what_passes_is_not_kept(tmp_path: Path) -> None:
    own = cache(tmp_path)
    for name in ("a.lock", "tmp_x/y", "tmpabc", ".hidden", "b.tmp", "c"):
        compile_kernel(own, name)
    Path(own.environment({})["TRITON_CACHE_DIR"], "link").symlink_to("/etc/passwd")
    assert sorted(own.new()) == ["triton/c", "triton/tmp_x/y"]


def test_a_file_that_grew_or_went_meanwhile_is_left_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("same", "grown", "gone"):
        (root / name).write_text("1")
    sizes = kernels.compiled(root)
    (root / "grown").write_text("22")
    (root / "gone").unlink()
    bundle = tmp_path / "b.tar.gz"
    assert kernels.pack(root, sizes, bundle) == 1
    assert kernels.unpack(bundle, tmp_path / "out") == {"same": 1}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    root = tmp_path / "packed"
    root.mkdir()
    (root / "kernel").write_bytes(os.urandom(20_000))
    path = tmp_path / "shared" / "0001-0-node1.tar.gz"
    assert kernels.pack(root, kernels.compiled(root), path) == 1
    return path


def test_a_damaged_bundle_is_not_used_and_said_to_be(tmp_path: Path, bundle: Path) -> None:
    whole = bundle.read_bytes()
    for damaged in (b"", b"text", whole[:-100], whole[:5000] + b"\0\0\0\0" + whole[5004:]):
        bundle.write_bytes(damaged)
        own = cache(tmp_path)
        (line,) = own.restore()
        assert line.startswith(f"{bundle}: not used, its kernels are compiled again: ")
        assert own.new() == {}
        assert own.known == {}
        own.remove()


@pytest.mark.parametrize("name", ["/etc/cron.d/x", "../../x", "a/../../x"])
def test_nothing_is_written_outside_the_caches(tmp_path: Path, name: str) -> None:
    hostile = tmp_path / "hostile.tar.gz"
    with gzip.open(hostile, "wb") as raw, tarfile.open(fileobj=raw, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(BrokenBundleError, match="not a file below the caches"):
        kernels.unpack(hostile, tmp_path / "caches" / "deep" / "er")


def test_no_link_is_made(tmp_path: Path) -> None:
    hostile = tmp_path / "hostile.tar.gz"
    link = tarfile.TarInfo("triton")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    with gzip.open(hostile, "wb") as raw, tarfile.open(fileobj=raw, mode="w") as archive:
        archive.addfile(link)
    with pytest.raises(BrokenBundleError):
        kernels.unpack(hostile, tmp_path)


def test_a_bundle_that_others_could_have_written_is_not_read(tmp_path: Path, bundle: Path) -> None:
    bundle.chmod(0o664)
    with pytest.raises(BrokenBundleError, match="others than its user"):
        kernels.unpack(bundle, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_each_file_is_kept_once_by_the_first_that_has_it_and_as_far_as_there_is_room() -> None:
    names = {"b": {"x": 5, "old": 9, "only b": 1}, "a": {"x": 5, "y": 6}, "c": {"too large": 50}}
    sharing = kernels.shared_out(names, {"old": 9}, room_bytes=12)
    assert sharing.by_host == {"a": ["x", "y"], "b": ["only b"]}
    assert sharing.files == {"x": 5, "y": 6, "only b": 1}
    assert sharing.without_room == 1
    assert sharing.line.endswith("kept for the next segments; 1 more are over kernel_cache.limit_gib")


def node(run: RunDir, tmp_path: Path, rank: int, nodes: int, lines: list[str]) -> tuple[KernelCache, KernelExchange]:
    own = cache(tmp_path, f"node{rank}")
    return own, KernelExchange(own, Attempt(run, 1, 0, rank, "7"), f"node{rank}", nodes, lines.append)


def test_after_two_steps_the_nodes_agree_and_every_kernel_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4kit.node.kernel_exchange._POLL_S", 0.01)
    run, lines = RunDir(tmp_path / "run"), list[str]()
    attempt = run.segment(1).attempt(0)
    attempt.path.mkdir(parents=True)
    members = [node(run, tmp_path, rank, 3, lines) for rank in range(3)]
    for rank, (own, exchange) in enumerate(members):
        compile_kernel(own, "everywhere")
        compile_kernel(own, f"stage{rank // 2}")
        exchange.begin()
        exchange.wait_restored()
    step = {"step": 1, "data": {"training/global_step": 1, "actor/grad_norm": 1.0}}
    attempt.metrics_file.write_text(json.dumps(step) + "\n")
    assert not KernelFiles(attempt, "").asked()
    with attempt.metrics_file.open("a") as metrics:
        metrics.write(json.dumps({**step, "step": 2}) + "\n")
    for _, exchange in members:
        exchange._thread.join(60)
    assert lines == ["3 files of kernels (0.0 MB) compiled in these steps, kept for the next segments"]
    restored = cache(tmp_path, "another")
    restored.restore()
    assert sorted(restored.known) == ["triton/everywhere", "triton/stage0", "triton/stage1"]
    # Node 1 had nothing that node 0 has not.
    assert [path.name for path in kernels.bundles(tmp_path / "shared")] == [
        "0001-0-node0.tar.gz",
        "0001-0-node2.tar.gz",
    ]


def test_a_driver_that_ends_before_is_not_waited_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.segment(1).attempt(0).path.mkdir(parents=True)
    for rank in range(2):
        _, exchange = node(run, tmp_path, rank, 2, [])
        exchange.begin()
        exchange.close(30)
        assert not exchange._thread.is_alive()


def test_a_disk_that_is_full_costs_the_kernels_and_nothing_else(tmp_path: Path) -> None:
    lines: list[str] = []
    run = RunDir(tmp_path / "run")
    own, exchange = node(run, tmp_path, 0, 1, lines)
    compile_kernel(own, "kernel")
    (tmp_path / "shared").write_text("a file, so that no directory can be made")
    files = KernelFiles(run.segment(1).attempt(0), "node0")
    files.ask()
    exchange._due = lambda: True  # type: ignore[method-assign]
    exchange.begin()
    exchange._thread.join(60)
    assert lines[-1].startswith("compiled kernels are not kept: [Errno 17] File exists")


def test_a_place_in_use_means_no_cache(tmp_path: Path) -> None:
    held = Scratch(tmp_path / "kernels-01234567")
    held.claim()
    with pytest.raises(FileExistsError, match="is in use"):
        Scratch(held.path).claim_empty()
    held.remove()
    Scratch(held.path).claim_empty()


def test_what_the_image_names_or_has_filled_is_left_as_it_is(tmp_path: Path) -> None:
    own = cache(tmp_path, asked=dataclasses.replace(ASKED, filled={"TRITON_CACHE_DIR": ".triton/cache"}))
    home = {"HOME": str(tmp_path / "home")}
    assert set(own.environment(home)) == {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
    assert set(own.environment({**home, "CUDA_CACHE_PATH": "/image/cuda"})) == {"TRITON_CACHE_DIR"}
    (tmp_path / "home" / ".triton" / "cache").mkdir(parents=True)
    assert set(own.environment(home)) == {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}  # empty
    (tmp_path / "home" / ".triton" / "cache" / "HASH").mkdir()
    assert set(own.environment(home)) == {"CUDA_CACHE_PATH"}


def test_kernels_are_not_kept_where_they_could_not_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dataclasses.replace(node_spec(tmp_path, scratch_dir=str(tmp_path)), kernels=ASKED)
    assert KernelCache.claim(dataclasses.replace(spec, kernels=None)) == (None, [])
    vast = dataclasses.replace(spec, kernels=dataclasses.replace(ASKED, limit_bytes=2**60))
    (line,) = KernelCache.claim(vast)[1]
    assert line.startswith(f"compiled kernels are not kept: {tmp_path} has ")
    assert "GiB free, fewer than kernel_cache.limit_gib" in line
    there = os.statvfs(tmp_path)
    noexec = os.statvfs_result([*there[:8], there.f_flag | os.ST_NOEXEC, *there[9:]])
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: noexec)
        assert "is mounted noexec" in KernelCache.claim(spec)[1][0]
    own, lines = KernelCache.claim(spec)
    assert own is not None
    assert lines == []
    assert KernelCache.claim(spec)[1] == [
        f"compiled kernels are not kept: {tmp_path}/kernels-{RunDir(tmp_path).digest} is in use"
    ]
    own.remove()


def test_what_a_killed_agent_left_of_kernels_goes(tmp_path: Path) -> None:
    left = tmp_path / "kernels-89abcdef"
    left.mkdir()
    (left / ".agent").touch()
    own = Scratch(tmp_path / "ray-9-0")
    own.claim()
    assert own.sweep() == [f"deleted {left}: left by an agent that is gone"]


def test_kernels_are_good_for_one_image_gpu_model_and_recipe() -> None:
    site = load_site("sandbox")
    base = load_settings("cpu", "tiny", "grpo").settings
    keys = {
        told.key(base, site, "/python"),
        told.key(base, site, "/other/python"),
        told.key(load_settings("cpu", "tiny", "sft").settings, site, "/python"),
        told.key(load_settings("h100", "dsv4-flash", "sft").settings, site, "/python"),
        told.key(load_settings("h200", "dsv4-flash", "sft").settings, site, "/python"),
    }
    assert len(keys) == 5
    assert told.key(base, site, "/python") in keys


def test_it_can_be_turned_off() -> None:
    off = load_settings("cpu", "tiny", "grpo", [Override("kernel_cache.enabled", False, "test")]).settings
    assert told.told(off, load_site("sandbox"), "/python") is None
    on = told.told(load_settings("cpu", "tiny", "grpo").settings, load_site("sandbox"), "/python")
    assert on is not None
    assert on.limit_bytes == 4 * 2**30
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"} <= on.variables.keys()
    assert len(set(on.variables.values())) == len(on.variables)


def test_a_new_run_begins_with_the_kernels_of_the_one_beside_it_that_compiled_last(tmp_path: Path) -> None:
    for name, at in (("older", 1000), ("newer", 2000), ("of-another-image", 3000)):
        directory = RunDir(tmp_path / name).kernels("other" if name.startswith("of") else "key")
        directory.mkdir(parents=True)
        (directory / "0001-0-node1.tar.gz").write_text(name)
        os.utime(directory, (at, at))
    new, staging = RunDir(tmp_path / "new"), RunDir(tmp_path / ".new.staging")
    line = told.bring(new, staging, "key")
    assert line == "compiled kernels: those of run newer, which had the same packages, GPU, model and recipe"
    (own,) = kernels.bundles(staging.kernels("key"))
    assert own.read_text() == "newer"
    assert own.name != KernelFiles(new.segment(1).attempt(0), "node1").bundle_name
    assert told.bring(new, staging, "unheard of") is None


def test_where_nothing_can_be_linked_the_first_segment_compiles(tmp_path: Path) -> None:
    theirs = RunDir(tmp_path / "older").kernels("key")
    theirs.mkdir(parents=True)
    (theirs / "0001-0-node1.tar.gz").write_text("x")
    (tmp_path / "staging").write_text("no directory")
    assert told.bring(RunDir(tmp_path / "new"), RunDir(tmp_path / "staging"), "key") is None


def test_a_run_of_an_older_kit_goes_on_in_another_image_without_them() -> None:
    told_before, told_now = {"kernels": {"key": "of one image"}}, {"kernels": {"key": "of another"}, "new": 1}
    assert changes.unknown_to_kit({}, told_before, told_now) == ["new"]
