"""The Dockerfile of one hardware, rendered from `templates/Dockerfile.j2`."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from dsv4kit.config.loading import hardware_of
from dsv4kit.config.schema import Hardware
from dsv4kit.image.stack import GitSource, Stack, place, stack_for
from dsv4kit.templates import environment

# Of the wheels in the locks: their files lie in nvidia/cu13.
_CUDA_MAJOR = 13
# CUDA's name of a platform's directories.
_CUDA_TARGETS = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}


def _of_role(sources: Mapping[str, GitSource], role: str) -> dict[str, GitSource]:
    return {name: source for name, source in sources.items() if source.role == role}


def architecture_of(hardware: Hardware) -> str:
    """`x86_64` or `aarch64`; this machine's where the hardware is any."""
    return hardware.cpu_architecture or platform.machine()


def requirements_of(stack: Stack) -> list[str]:
    """The files of packages an image installs, in this order, as they are named in the build's context."""
    if stack.locks:
        return [f"requirements/{name}" for name in stack.locks]
    compiled = any(package.role == "compile" for package in stack.index.values())
    files = [
        "build.txt",
        *["compile_with.txt"] * bool(stack.compile_with),
        "packages.txt",
        *["compiled.txt"] * compiled,
    ]
    return [f"requirements/{name}" for name in files]


def render(hardware: str, stack: str | None = None) -> str:
    """The Dockerfile. `stack`: another one than the hardware's usual. Raises UserError for an unknown name."""
    return render_stack(hardware_of(hardware), stack_for(hardware, stack))


def render_stack(hardware: Hardware, stack: Stack, cache_mounts: bool = True) -> str:
    """The Dockerfile of a stack on a hardware. `cache_mounts`: the engine knows `RUN --mount=type=cache`."""
    base, sm = stack.base, hardware.sm_architecture
    return (
        environment()
        .get_template("Dockerfile.j2")
        .render(
            hardware=hardware,
            stack=stack,
            of_role=_of_role,
            place=place,
            cache_mounts=cache_mounts,
            gpu=hardware.device == "cuda",
            architecture=architecture_of(hardware),
            base_image=f"{base.image}@{base.digest}" if base.digest else "",
            interpreter=f"python{stack.python}" if f"python{stack.python}" in stack.system else "python3",
            site_packages=f"/opt/venv/lib/python{stack.python}/site-packages",
            requirements=requirements_of(stack),
            compiled_packages=[name for name, package in stack.index.items() if package.role == "compile"],
            cuda_arch=f"{sm // 10}.{sm % 10}" if sm else None,
            cuda_major=_CUDA_MAJOR,
            cuda_target=_CUDA_TARGETS[architecture_of(hardware)],
        )
    )
