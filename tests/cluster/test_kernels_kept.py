"""Kernels that a segment compiles on its nodes are there on all of them in the next, wherever that runs."""

import tarfile
from collections.abc import Iterator

import pytest
from test_chain import Cluster

from dsv4kit.config.loading import load_site
from dsv4kit.run import phases
from dsv4kit.sandbox.cluster import Sandbox
from dsv4kit.sandbox.runtime import runtime_python


@pytest.fixture(scope="module")
def cluster(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(sandbox, tmp_path_factory.mktemp("kernels"), runtime_python())
    yield made
    made.slurm.run("scancel", "--me")


def test_the_second_segment_finds_what_the_first_compiled_on_both_nodes(cluster: Cluster) -> None:
    changes = [("recipe.module", "stand_in_sft"), ("env.STAND_IN_COMPILES", "1")]
    changes += [("schedule.steps", 5), ("schedule.segment_steps", 4), ("env.STAND_IN_GATE", "")]
    spec = cluster.submission("kernels", *changes, recipe="sft").node_spec()
    assert spec.kernels is not None
    # The third step begins once the second node has kept its share, the last thing that is written.
    kept = cluster.root / "kernels" / "kernels" / spec.kernels.key
    changes[-1] = ("env.STAND_IN_GATE", f"3:{kept}/0001-0-node2.tar.gz")
    site = load_site("sandbox")
    site = site.model_copy(update={"slurm": site.slurm.model_copy(update={"extra": ["--nodelist=node1,node2"]})})
    run = cluster.submit("kernels", *changes, recipe="sft", site=site)
    state = cluster.wait(run)
    assert state.state == "finished", state.reason
    found = {}
    for bundle in sorted(kept.iterdir()):
        with tarfile.open(bundle) as archive:
            found[bundle.name] = archive.getnames()
    assert found == {
        "0001-0-node1.tar.gz": ["triton/everywhere/kernel.so", "triton/rank0/kernel.so"],
        "0001-0-node2.tar.gz": ["triton/rank1/kernel.so"],
    }
    said = [run.segment(number).attempt(0).driver_log.read_text() for number in (1, 2)]
    assert "rank 0: everywhere compiled" in said[0]
    assert "rank 0: everywhere found" in said[1]
    assert "rank 0: rank0 found" in said[1]
    other = run.segment(2).attempt(0).nodes / "node2.torchrun.log"
    assert "rank 1: rank1 found" in other.read_text()
    notes = [phases.parse(run.segment(number).attempt(0).phases_file.open("rb"))[1] for number in (1, 2)]
    assert notes[0] == ["3 files of kernels (0.0 MB) compiled in these steps, kept for the next segments"]
    assert notes[1][0].startswith("3 files of kernels (0.0 MB) compiled before, there after ")
    left = cluster.sandbox.exec("node2", ["sh", "-c", "ls -d /tmp/kernels-* /tmp/ray-* 2>/dev/null"], capture=True)
    assert left.stdout == ""
