"""Runs DeepSeek-V4 itself on a CPU, from checkouts of Megatron-LM (branch dev) and Megatron-Bridge.

    make test-v4 MEGATRON_LM=DIRECTORY MEGATRON_BRIDGE=DIRECTORY

The two are put first on the path of the CPU runtime's Python; nothing is installed and no file of theirs is changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "megatron"), str(HERE.parents[1])]

import environment  # noqa: E402

PLACES = {
    "MEGATRON_LM": Path("megatron/core/transformer/experimental_attention_variant/deepseek_v4_hybrid_attention.py"),
    "MEGATRON_BRIDGE": Path("src/megatron/bridge/models/deepseek/deepseek_v4_bridge.py"),
}
"""A file that the checkout has to have: Megatron-LM's main branch and its releases lack V4."""


def missing() -> str:
    """What keeps the tests from running, in one line; empty when nothing does."""
    for name, file in PLACES.items():
        given = os.environ.get(f"DSV4KIT_{name}")
        if not given:
            return (
                f"no {name}=DIRECTORY: make test-v4 MEGATRON_LM=... MEGATRON_BRIDGE=... (docs/v4.md says which commits)"
            )
        if not (Path(given).expanduser() / file).is_file():
            return f"{name}={given}: no {file} in there, so no DeepSeek-V4 (docs/v4.md says which commits have it)"
    if environment.python() is None:
        return "no CPU runtime: `make runtime` installs it"
    return ""


def run(arguments: list[str]) -> int:
    """pytest on this directory, with the checkouts first."""
    lm, bridge = (Path(os.environ[f"DSV4KIT_{name}"]).expanduser().resolve() for name in PLACES)
    path = [lm, bridge / "src", environment.install(), environment.ROOT]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "DSV4KIT_TEST_V4": "1"}
    variables.pop("VERL_USE_EXTERNAL_MODULES", None)
    command = [str(environment.python()), "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "--show-capture=no"]
    return subprocess.run([*command, "-rs", str(HERE), *arguments], env=variables, cwd=environment.ROOT).returncode


def main() -> int:
    """See the module."""
    if problem := missing():
        print(problem, file=sys.stderr)
        return 2
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
