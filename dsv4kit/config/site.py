"""What a cluster needs: `slurm/sites/*.yaml`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from dsv4kit.config import site_values
from dsv4kit.config.schema import EnvName, EnvValue, PositiveInt, SlurmName, Strict


class Container(Strict):
    """How a site runs an image."""

    runtime: Literal["none", "pyxis"] = Field(
        description="`none`: the node's own Python; `pyxis`: NVIDIA's plugin of srun, with enroot below it"
    )
    image: Annotated[str | None, AfterValidator(site_values.image), Field(validate_default=True)] = Field(
        default=None, description="squashfs image, an absolute path all nodes can read"
    )
    mounts: list[Annotated[str, AfterValidator(site_values.mount)]] = Field(
        default=[],
        description="SRC, SRC:DST or SRC:DST:FLAGS of the host; the run, its checkpoints, data and weights come by"
        " themselves",
    )
    writable: bool = Field(default=False, description="the image's files can be written to, for `setup`; lost after it")

    @field_validator("image")
    @classmethod
    def _needed_by_pyxis(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("runtime") == "pyxis":
            raise ValueError("runtime pyxis needs an image")
        return value


class Network(Strict):
    """Which network the nodes talk over."""

    interface: str | None = Field(description="its address is given to Ray; null takes the address of the host name")


class Slurm(Strict):
    """What sbatch is told on this site."""

    version: Annotated[str | None, AfterValidator(site_values.version)] = Field(
        default=None,
        description="what `sbatch --version` says, e.g. 24.05.4; null: options newer than 22.05 are left out",
    )
    partition: SlurmName | None = None
    account: SlurmName | None = None
    qos: SlurmName | None = None
    reservation: SlurmName | None = None
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
    extra: list[Annotated[str, AfterValidator(site_values.option)]] = Field(
        default=[], description="further sbatch options, as written after #SBATCH"
    )


class Site(Strict):
    """One cluster."""

    name: str
    description: str
    slurm: Slurm
    container: Container
    network: Network
    python: str | None = Field(
        description="Python of the trainer's environment, in the container if there is one; null: the sandbox's own"
        " runtime"
    )
    scratch_dir: Annotated[str, AfterValidator(site_values.absolute)] = Field(
        description="node-local directory for Ray's sockets and logs; short, see node/ray_cluster.py"
    )
    env: dict[EnvName, EnvValue] = Field(
        default={}, description="what this cluster's network and containers need; wins over the profile's env"
    )
    secrets_file: Annotated[str | None, AfterValidator(site_values.absolute_or_none)] = Field(
        default=None,
        description="shell file of NAME=value lines (keys for trackers), mode 0600, read by the batch script when a"
        " segment starts",
    )
    setup: list[str] = Field(
        default=[],
        description="shell commands run once per node before Ray or torchrun, in the container if there is one; what"
        " they export stays",
    )
    setup_limit_s: PositiveInt = Field(default=900, description="a node whose setup takes longer has failed")
    follow: bool = Field(description="`submit` stays and shows the run until it ends")
