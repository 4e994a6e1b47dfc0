"""The early proof of pro-grpo on real packages: what it says of them as they are, and that it finds planted faults."""

from __future__ import annotations

import re

import pytest
from lab import Container, Lab

from dsv4kit.errors import UserError

# What verl main of August 2026 lacks, which no commit that could be had has: measured fault of the specification (P6).
VERL_IS_TOO_OLD = r"verl|vLLM .* needs a verl with #8234"


def about(lines: list[str], pattern: str) -> list[str]:
    return [line for line in lines if re.search(pattern, line)]


@pytest.fixture(scope="module")
def unplanted(container: Container) -> list[str]:
    """What the proof says of the packages and sources as they are."""
    return container.proof()


def test_the_stage_of_the_dockerfile_ends_there(lab: Lab) -> None:
    """The first test: a build that fails removes every container of the storage, which is its own."""
    with pytest.raises(UserError, match=r"buildah build failed at step .*"):
        lab.build_early()
    assert "dsv4kit.image.manifest --early" in lab.log.read_text(errors="replace")


def test_the_packages_are_those_of_the_lock_and_no_megatron_is_among_them(lab: Lab) -> None:
    assert lab.context is not None
    name = lab.engine.run("from", "--pull-never", "localhost/dsv4kit-gpu-test:packages").stdout.strip()
    try:
        made = Container(lab, name, lab.root)
        listed = made.sh("pip list --format=freeze").lower()
    finally:
        lab.engine.run("rm", name, check=False)
    assert "torch==2.13.0" in listed
    assert "transformer_engine_cu13==2.17.1" in listed.replace("-", "_")
    assert not re.search(r"^megatron[-_](core|bridge)==", listed, re.M)


def test_all_that_the_proof_finds_is_a_verl_without_the_two_fixes(unplanted: list[str]) -> None:
    assert unplanted
    assert [line for line in unplanted if not re.search(VERL_IS_TOO_OLD, line)] == []


def test_a_verl_without_8234_beside_vllm_0_29_is_found(unplanted: list[str]) -> None:
    assert about(unplanted, r"#8234|start rank")


def test_a_release_of_megatron_is_found(container: Container) -> None:
    container.sh("pip install --no-deps megatron-core==0.19.2")
    try:
        found = container.proof()
    finally:
        container.sh("pip install --no-deps --no-build-isolation --no-index /opt/dsv4kit/sources/megatron-core/tree")
    assert about(found, "dsv4_hybrid")
    assert about(found, "has no field csa_compress_ratios")


@pytest.mark.parametrize("variable", ["CUDNN_PATH", "CUDNN_HOME"])
def test_a_variable_that_hides_seven_files_of_cudnn_is_found(
    container: Container, unplanted: list[str], variable: str
) -> None:
    assert not about(unplanted, "transformer_engine")
    found = container.proof(f"{variable}=/opt/venv/lib/python3.12/site-packages/nvidia/cudnn")
    assert about(found, r"import transformer_engine\.common: .*libcudnn")


def test_a_broken_part_of_a_package_that_loads_late_is_found(container: Container, unplanted: list[str]) -> None:
    package = container.site / "cudnn" / "deepseek_sparse_attention"
    assert not about(unplanted, "cudnn.deepseek_sparse_attention")
    victim = max(package.rglob("*.py"), key=lambda path: len(path.parts))
    before = victim.read_text()
    try:
        victim.write_text("raise ImportError('planted')\n")
        assert container.run("python -c 'from cudnn import DSA'").returncode == 0  # which is why that proves nothing
        found = container.proof()
    finally:
        victim.write_text(before)
    assert about(found, r"import cudnn\.deepseek_sparse_attention\.\*: .*planted")


def test_the_compiler_and_headers_of_the_lock_are_where_builds_look(container: Container) -> None:
    program = """#include <cuda_profiler_api.h>
#include <nvml.h>
#include <cub/cub.cuh>
#include <cudnn.h>
__global__ void twice(float *x) { x[threadIdx.x] *= 2; }
"""
    (container.root / "tmp" / "a.cu").write_text(program)
    packages = "/opt/venv/lib/python3.12/site-packages/nvidia"
    cpath = f"/usr/local/cuda/targets/x86_64-linux/include/cccl:{packages}/cudnn/include"
    container.sh(f"CPATH={cpath} /usr/local/cuda/bin/nvcc -arch=sm_90 -c /tmp/a.cu -o /tmp/a.o")
    container.sh("g++ -shared /tmp/a.o -o /tmp/a.so -L/usr/local/cuda/lib64 -lcudart")
