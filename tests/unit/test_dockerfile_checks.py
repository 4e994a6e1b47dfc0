"""Each check of a Dockerfile finds the defect it is there for, planted into a real one."""

import re

import pytest

from dsv4kit.image import checks
from dsv4kit.image.render import render

MLA = "b7643bd54521f563b839b98289b5cd048c062ba2"
TRAINER = "FROM packages AS trainer\n"
KERNELS = ("fast-hadamard-transform", "flash-mla")
CONTEXT = [
    *(f"requirements/{name}.txt" for name in ("build", "compile_with", "packages", "compiled")),
    *(f"sources/{name}/sha" for name in (*KERNELS, "flash-mla-cutlass", "megatron-core", "megatron-bridge", "verl")),
    *(f"wheels/{name}/key.json" for name in (*KERNELS, "packages")),
    "kit/x",
    "image.json",
]
RUN = "RUN set -eu; \\\n    if [ -d /src/given"


@pytest.fixture(scope="module")
def text() -> str:
    return render("gb200")


def found(text: str, old: str, new: str, context: list[str] | None = CONTEXT) -> list[str]:
    assert old in text
    return checks.problems(text.replace(old, new, 1), context)


def test_the_text_as_it_is_has_none(text: str) -> None:
    assert checks.problems(text, CONTEXT) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("ARG MAX_JOBS=4\n", "ARG MAX_JOBS=4\nRUN set -eu; echo ${MAX_JBOS}\n", r"MAX_JBOS.*did you mean 'MAX_JOBS'"),
        (TRAINER, TRAINER + "ENV X=${BASE_IMAGE}\n", "ARG it again in this stage"),
        (TRAINER, f"{TRAINER}RUN set -eu; make -j $MAX_JOBS\n", "MAX_JOBS.*trainer"),
        (TRAINER, TRAINER + "ENV X=${TORCH_CUDA_ARCH_LIST}\n", "TORCH_CUDA_ARCH"),
        ("ARG BASE_IMAGE=", "ARG BASE_IMAG=", "BASE_IMAGE.*no ARG before the first FROM"),
        ("FROM system AS compilable", "FROM ubuntu:24.04 AS compilable", "neither a stage above nor an image"),
        ("FROM compilable AS kernels", "FROM compilable AS kernels\nSHELL [\"/bin/bash\", \"-c\"]", "SHELL"),
        (RUN, "RUN <<EOF\nset -eu\nEOF\n" + RUN, "heredoc"),
        ("COPY image.json", "COPY <<EOF /x\nEOF\nCOPY image.json", "heredoc"),
        (RUN, RUN.replace("RUN", "RUN --mount=type=tmpfs,target=/tmp"), "tmpfs"),
        (RUN, RUN.replace("set -eu; ", ""), "does not begin with `set -eu;`"),
        ("--no-deps --no-build-isolation --wheel-dir", "--no-deps -no-build-isolation --wheel-dir", "pip: .-no-build"),
        ("--require-hashes", "--require-hash", r"'--require-hash'.*did you mean '--require-hashes'"),
        ("pip install --no-deps --no-index", "pip install --no-index", "without --no-deps"),
        ("--no-deps --no-index /src", "--no-deps apex /src", "apex is something else on the package index"),
        ("--no-deps --no-index /src", "--no-deps deep_ep /src", "deep_ep is something else on the package index"),
        ("--no-deps --no-index /src", "--no-deps wandb /src", "wandb is taken from the index by name"),
        ("--no-deps --no-index /src", "--no-deps git+https://x.org/y@main /src", r"git\+: not at a full commit sha"),
        ("--detach \"${VERL_SHA}\"", "--detach \"${BRANCH:-main}\"", "git clone into /src/verl: no full commit sha"),
        ("clone --quiet", "clone --branch main --quiet", "a branch moves"),
        (f"{{FLASH_MLA_SOURCE}}\" {MLA}", "{FLASH_MLA_SOURCE}\" nv_dev", "git fetch: 'nv_dev' is not a full"),
        ("COPY kit ", "COPY kti ", r"COPY kti: not in the build's context"),
        ("COPY --from=kernels", "COPY --from=kernel", r"no such stage above.*did you mean 'kernels'"),
        ("COPY kit ", "ADD kit ", "ADD"),
    ],
)  # fmt: skip
def test_each_defect_is_found(text: str, old: str, new: str, problem: str) -> None:
    problems = found(text, old, new)
    assert any(re.search(problem, line) for line in problems), problems
    assert all(re.match(r"line \d+: ", line) for line in problems)


def test_a_variable_of_the_shell_or_in_single_quotes_is_none_of_the_dockerfiles(text: str) -> None:
    fine = 'RUN set -eu; for x in a b; do echo "${x}"; done; y=1; echo "$y" \'$z\'\n'
    assert found(text, TRAINER, TRAINER + fine) == []


def test_the_line_is_that_of_the_instruction(text: str) -> None:
    line = text.splitlines().index("COPY image.json /opt/dsv4kit/image.json") + 1
    assert found(text, "COPY image.json", "COPY imgae.json")[0].startswith(f"line {line}: ")
