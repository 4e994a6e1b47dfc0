"""The environment of these tests: the kit's CPU runtime (torch, verl) plus Megatron-Core in a directory of its own.

    python tests/megatron/environment.py            install what is missing, then run the tests there
    python tests/megatron/environment.py -k norm    the same with arguments for pytest
    make test-megatron MEGATRON_LM=DIRECTORY        the same against a checkout of Megatron-LM (DSV4KIT_MEGATRON_LM)

The directory is `<cache>/megatron-test/<key>/`, the key made of the lock file and the architecture; it holds about
20 MB. torch is not installed twice. The runtime is the one of `dsv4kit sandbox up`, or $DSV4KIT_TEST_PYTHON.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOCK = ROOT / "containers" / "locks" / "megatron-test.lock"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def packages_dir() -> Path:
    """Where the packages of the lock file are, or would be."""
    from dsv4kit.sandbox.runtime import cache_dir

    key = hashlib.sha256(LOCK.read_bytes() + platform.machine().encode()).hexdigest()[:16]
    return cache_dir() / "megatron-test" / key


def python() -> Path | None:
    """The Python with torch and verl; None when there is none yet."""
    from dsv4kit.errors import UserError
    from dsv4kit.sandbox.runtime import runtime_python

    if own := os.environ.get("DSV4KIT_TEST_PYTHON"):
        return Path(own)
    try:
        return runtime_python(install=False)
    except UserError:
        return None


def own_checkout() -> Path | None:
    """The Megatron-LM to test against in place of the lock file's; None without the variable."""
    if not (given := os.environ.get("DSV4KIT_MEGATRON_LM")):
        return None
    checkout = Path(given).expanduser().resolve()
    if not (checkout / "megatron" / "core" / "package_info.py").is_file():
        raise SystemExit(f"MEGATRON_LM={given}: no megatron/core in there; a checkout of NVIDIA/Megatron-LM is wanted")
    return checkout


def install() -> Path:
    """Installs the lock file's packages where they are missing; a directory that exists is complete."""
    packages = packages_dir()
    if packages.is_dir():
        return packages
    packages.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and renamed, so that a broken download leaves nothing that looks whole.
    made = Path(tempfile.mkdtemp(dir=packages.parent))
    machine = platform.machine()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(made), "--no-deps", "--no-compile"]
    command += ["--require-hashes", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    command += ["--ignore-requires-python"]  # pip 23 asks the Python it runs on, not the one named here
    for glibc in ("2_28", "2_24", "2_17"):
        command += ["--platform", f"manylinux_{glibc}_{machine}"]
    try:
        subprocess.run([*command, "--requirement", str(LOCK)], check=True)
        made.chmod(0o755)
        made.rename(packages)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return packages


def run(interpreter: Path, packages: Path, arguments: list[str]) -> int:
    """pytest on this directory, in that environment."""
    first = [str(checkout)] if (checkout := own_checkout()) else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*first, str(packages), str(ROOT)])}
    # No plugin of the session that starts us, no second run of the starter.
    environment.pop("VERL_USE_EXTERNAL_MODULES", None)
    command = [
        str(interpreter),
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "--show-capture=no",
        str(HERE),
        *arguments,
    ]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


def main() -> int:
    """See the module."""
    interpreter = python()
    if interpreter is None:
        print("no CPU runtime: `dsv4kit sandbox up` installs it; or set DSV4KIT_TEST_PYTHON", file=sys.stderr)
        return 2
    return run(interpreter, install(), sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
