"""The locks of the GPU stacks: made by uv from `containers/stack.yaml`, one per stack and architecture, with hashes.

A lock says in its second line what it was made from; one that no longer matches the stack is refused.
`python -m dsv4kit.image.locks UV` makes them all (`make lock`).
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.config.paths import ROOT
from dsv4kit.errors import UserError
from dsv4kit.image.stack import NOT_ON_THE_INDEX, WITHOUT_V4, Stack, canonical, stacks
from dsv4kit.run.files import write_text

DIRECTORY = ROOT / "containers" / "locks"
ARCHITECTURES = ("x86_64", "aarch64")
# glibc of the base images (Ubuntu 24.04); nvidia-resiliency-ext has no wheel for an older one.
_PLATFORM = "manylinux_2_39"
_INPUTS = "# inputs: sha256:"
# What sdists are built with; installed before everything else, because builds see the image's own environment.
BUILD_TOOLS = ("ninja", "packaging", "pybind11", "setuptools", "wheel")


@dataclass(frozen=True)
class Inputs:
    """What the resolver is given, as the texts of its four files."""

    requirements: str
    overrides: str
    constraints: str
    config: str
    left_out: tuple[str, ...]
    python: str
    platform: str

    @property
    def digest(self) -> str:
        """Of everything that decides what comes out, the index's own changes aside."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def path(stack: Stack, architecture: str) -> Path:
    """Where the lock lies."""
    return DIRECTORY / f"{stack.name}.{architecture}.lock"


def inputs(stack: Stack, architecture: str) -> Inputs:
    """What the lock of this stack is made from."""
    never = [f"{name} ; sys_platform == 'never'" for name in stack.never]
    metadata = "".join(
        f'[[dependency-metadata]]\nname = "{pin.partition("==")[0]}"\nversion = "{pin.partition("==")[2]}"\n'
        f"requires-dist = {[str(requirement) for requirement in asks]}\n".replace("'", '"')
        for pin, asks in stack.metadata.items()
    )
    return Inputs(
        requirements=_lines(f"{name}=={package.version}" for name, package in stack.index.items()),
        overrides=_lines([*stack.overrides, *never]),
        constraints=_lines(stack.caps),
        config=metadata,
        left_out=tuple(canonical(name) for name, package in stack.index.items() if package.role == "dependencies"),
        python=stack.python,
        platform=f"{architecture}-{_PLATFORM}",
    )


def read(stack: Stack, architecture: str) -> str:
    """The lock's text. Raises UserError where it is missing, or was made from something else than the stack of now."""
    file = path(stack, architecture)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file.relative_to(ROOT)}: {error.strerror}; `make lock` makes it") from None
    except ValueError:
        raise UserError(f"{file.relative_to(ROOT)}: damaged; `make lock` makes it again") from None
    found = next((line for line in text.splitlines() if line.startswith(_INPUTS)), "")
    if found.removeprefix(_INPUTS) != inputs(stack, architecture).digest:
        raise UserError(
            f"{file.relative_to(ROOT)}: not made from what containers/stack.yaml says now about {stack.name};"
            " `make lock` makes it again"
        )
    return text


def entries(text: str) -> Iterator[tuple[str, str]]:
    """(canonical name, the lines of the entry) of every package in a lock."""
    for entry in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.M)[1:]:
        yield canonical(entry), entry


def split(stack: Stack, text: str) -> dict[str, str]:
    """The lock as files that an image installs one after the other; the compiled packages are the last."""
    compiled = {canonical(name) for name, package in stack.index.items() if package.role == "compile"}
    files = {"build.txt": "", "compile_with.txt": "", "packages.txt": "", "compiled.txt": ""}
    for name, entry in entries(text):
        if name in compiled:
            file = "compiled.txt"
        elif name in BUILD_TOOLS:
            file = "build.txt"
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in stack.compile_with):
            file = "compile_with.txt"
        else:
            file = "packages.txt"
        files[file] += entry
    return files


def problems(text: str) -> list[str]:
    """What may not be in a lock that is installed: no hash, no exact version, another package under a known name."""
    found = []
    for name, entry in entries(text):
        if name in NOT_ON_THE_INDEX:
            found.append(f"{name}: something else on the package index; take it from git, at a sha")
        if name in WITHOUT_V4:
            found.append(f"{name}: from the index it has no DeepSeek-V4; it comes from git, at a sha")
        if "==" not in entry.splitlines()[0]:
            found.append(f"{name}: no exact version")
        if "--hash=sha256:" not in entry:
            found.append(f"{name}: no hash")
    if "://" in text:
        found.append("an address: a lock names packages, never where they come from")
    return found


def make(stack: Stack, architecture: str, uv: str) -> None:
    """Resolves and writes one lock. Raises UserError with the resolver's own words where there is no solution."""
    asked = inputs(stack, architecture)
    with tempfile.TemporaryDirectory() as directory:
        files = {name: Path(directory) / name for name in ("requirements.in", "overrides.txt", "caps.txt", "uv.toml")}
        texts = (asked.requirements, asked.overrides, asked.constraints, asked.config)
        for file, content in zip(files.values(), texts, strict=True):
            file.write_text(content, encoding="utf-8")
        command: list[str | Path] = [uv, "--config-file", files["uv.toml"], "pip", "compile", "--quiet"]
        command += ["--python-version", asked.python, "--python-platform", asked.platform]
        command += ["--generate-hashes", "--no-header", "--no-annotate", "--override", files["overrides.txt"]]
        command += ["--constraint", files["caps.txt"], *(f"--no-emit-package={name}" for name in asked.left_out)]
        output = Path(directory) / "lock"  # versions already locked stay where they still fit
        output.write_text(path(stack, architecture).read_text() if path(stack, architecture).exists() else "")
        command += ["--output-file", output]
        done = subprocess.run([*command, files["requirements.in"]], capture_output=True, text=True)
        resolved = output.read_text(encoding="utf-8")
    if done.returncode != 0:
        raise UserError(f"{stack.name} for {architecture}: {' '.join(done.stderr.split())[:800]}")
    head = f"# {stack.name} for {architecture}, made by `make lock` from containers/stack.yaml; not to be edited.\n"
    text = f"{head}{_INPUTS}{asked.digest}\n{resolved}"
    for problem in problems(text):
        raise UserError(f"{stack.name} for {architecture}: {problem}")
    write_text(path(stack, architecture), text)


def _lines(texts: Iterable[str]) -> str:
    return "".join(f"{text}\n" for text in texts)


def main(arguments: list[str]) -> int:
    """Makes every lock that is made here; the argument is uv's path."""
    try:
        for stack in stacks().values():
            for architecture in ARCHITECTURES if stack.index else ():
                print(f"dsv4kit: locking {stack.name} for {architecture}", flush=True)
                make(stack, architecture, arguments[0])
    except UserError as error:
        print(f"dsv4kit: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
