"""What a cluster needs: `slurm/sites/*.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dsv4kit.config import site_values
from dsv4kit.config.schema import EnvName, EnvValue, PositiveInt, SlurmName
from dsv4kit.config.section import WHOLE, Section


class Container(Section):
    """How a site runs an image."""

    runtime: Literal["none", "pyxis", "bwrap"] = Field(
        description="`none`: the node's own Python; `pyxis`: NVIDIA's plugin of srun, with enroot below it; `bwrap`:"
        " bubblewrap, where there is no pyxis"
    )
    image: Annotated[str | None, AfterValidator(site_values.image)] = Field(
        default=None, description="squashfs image, an absolute path all nodes can read"
    )
    mounts: list[Annotated[str, AfterValidator(site_values.mount)]] = Field(
        default=[],
        description="SRC, SRC:DST or SRC:DST:FLAGS of the host; the run, its checkpoints, data and weights come by"
        " themselves",
    )
    writable: bool = Field(default=False, description="the image's files can be written to, for `setup`; lost after it")

    def rules(self) -> Iterator[tuple[str, str]]:
        """A container needs an image."""
        if self.runtime != "none" and self.image is None:
            yield "image", f"runtime {self.runtime} needs an image"


class SiteNetwork(Section):
    """Which network the nodes talk over."""

    interface: str | None = Field(description="its address is given to Ray; null takes the address of the host name")


class SlurmOptions(Section):
    """What sbatch is told on this site."""

    version: Annotated[str | None, AfterValidator(site_values.version)] = Field(
        default=None,
        description="what `sbatch --version` says, e.g. 24.05.4; null: options newer than 22.05 are left out",
    )
    partition: SlurmName | None = None
    account: SlurmName | None = None
    qos: SlurmName | None = None
    reservation: SlurmName | None = None
    exclude: Annotated[str | None, AfterValidator(site_values.nodes)] = Field(
        default=None, description="nodes no job of a run may have, as sbatch's --exclude takes them: node[3-5],node9"
    )
    gpu_option: Literal["gpus-per-node", "gres", "none"] = Field(description="how GPUs are asked for here")
    cpus_per_task: PositiveInt | None = Field(
        default=None, description="CPUs asked for on a node; null: the hardware's cpus_per_node"
    )
    exclusive: bool = Field(default=False, description="ask for whole nodes (--exclusive)")
    all_memory: bool = Field(
        default=False, description="ask for all memory of a node (--mem=0); --exclusive alone does not give it"
    )
    block_topology: bool = Field(
        default=False,
        description="the cluster has topology/block, a block per NVLink domain: ask for whole parts of a block"
        " (--segment), so that expert groups and rollout replicas stay inside one",
    )
    grace_s: PositiveInt = Field(description="the time-limit signal comes this long before the end")
    requeue: bool = Field(description="let Slurm start the same segment again after a node failure")
    chain: Annotated[int, Field(ge=2, le=1_000_000_000), WHOLE] | None = Field(
        default=None,
        description="most jobs of one run in the queue at the same time, where the cluster limits them: each segment"
        " submits the next ones, from the node its batch script runs on; null: all are submitted at once",
    )
    extra: list[Annotated[str, AfterValidator(site_values.option)]] = Field(
        default=[], description="further sbatch options, as written after #SBATCH"
    )


class Site(Section):
    """One cluster."""

    name: str
    description: str
    slurm: SlurmOptions
    container: Container
    network: SiteNetwork
    python: str | None = Field(
        description="Python of the trainer's environment, in the container if there is one; null: the sandbox's own"
        " runtime"
    )
    scratch_dir: Annotated[str, AfterValidator(site_values.absolute)] = Field(
        description="node-local directory for Ray's sockets and logs; short, see node/ray/cluster.py"
    )
    env: dict[EnvName, EnvValue] = Field(
        default={}, description="what this cluster's network and containers need; wins over the profile's env"
    )
    secrets_file: Annotated[str | None, AfterValidator(site_values.absolute_or_none)] = Field(
        default=None,
        description="shell file of NAME=value lines (keys for trackers), mode 0600 or 0400, read by the batch script"
        " when a segment starts",
    )
    setup: list[str] = Field(
        default=[],
        description="shell commands run once per node before Ray or torchrun, in the container if there is one; what"
        " they export stays",
    )
    setup_limit_s: PositiveInt = Field(default=900, description="a node whose setup takes longer has failed")
    follow: bool = Field(description="`submit` stays and shows the run until it ends")

    def in_image(self, image: str) -> Site:
        """This site with another image. One without containers enters it by bubblewrap, with the image's own Python."""
        container = self.container.model_copy(update={"image": image})
        if container.runtime != "none":
            return Site.model_validate({**self.model_dump(), "container": container.model_dump()})
        container = container.model_copy(update={"runtime": "bwrap"})
        return Site.model_validate({**self.model_dump(), "container": container.model_dump(), "python": "python3"})
