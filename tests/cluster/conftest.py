"""The cluster that these tests run on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4kit.sandbox.cluster import Sandbox, SandboxSpec
from dsv4kit.sandbox.spec import ROOT_VARIABLE


@pytest.fixture(scope="session")
def sandbox_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this session's sandboxes keep their state; whatever is up there at the end is taken down."""
    if os.geteuid() != 0:
        pytest.skip("the sandbox needs root")
    root = tmp_path_factory.mktemp("sandboxes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROOT_VARIABLE, str(root))
        yield root
        for state in sorted(path for path in root.iterdir() if path.is_dir()):
            Sandbox.take_down(state.name, root=root)


@pytest.fixture(scope="session")
def small_disk(sandbox_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 32 MiB, which the nodes see because it is there before they are."""
    place = tmp_path_factory.mktemp("small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture(scope="session")
def sandbox(sandbox_root: Path, small_disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """Four nodes with one fake GPU each, which see the tests' temporary directories.

    A test that changes a node leaves it as it was. Slurm's commands need `sandbox.client_env` in their environment.
    """
    spec = SandboxSpec(name=f"test-{os.getpid()}", nodes=4, gpus_per_node=1)
    return Sandbox.up(spec, share=[tmp_path_factory.getbasetemp()])
