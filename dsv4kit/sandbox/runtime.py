"""The trainer's environment for HW=cpu: a virtual environment with verl, vLLM, Ray and torch for CPU, made once.

It lies in `<cache>/runtime/<key>/`, the key made of the lock files, the Python version and the processor architecture:
another lock makes another environment, and one that is complete is never changed. `<cache>` is $DSV4KIT_CACHE, else
$XDG_CACHE_HOME/dsv4kit, else ~/.cache/dsv4kit.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dsv4kit import locking
from dsv4kit.config.cache import cache_dir
from dsv4kit.errors import UserError

Log = Callable[[str], None]

LOCKS = Path(__file__).resolve().parents[2] / "containers" / "locks"
PACKAGES_LOCK = LOCKS / "cpu-runtime.lock"  # every package but torch, with hashes
TORCH_LOCK = LOCKS / "cpu-torch.txt"  # torch alone: its CPU wheel comes from wherever this machine's pip finds it
MAKE_ASSETS = Path(__file__).with_name("tiny") / "make_assets.py"
MAKE_DSV4 = MAKE_ASSETS.with_name("make_dsv4.py")  # imports the other

# verl needs <3.13; several pins (numpy, pandas) have no wheel for 3.10. The first one found is taken.
PYTHONS = ("3.11", "3.12")
NEEDED_BYTES = 5 * 10**9  # 3.0 GB installed, the rest while wheels are unpacked
STAMP = ".complete"


def runtime_python(install: bool = True, torch_index: str | None = None, log: Log = print) -> Path:
    """The Python of the CPU runtime; installs it first where it is missing (minutes, about 3 GB).

    `torch_index` ($TORCH_INDEX) is the package index that has torch's CPU wheel, where pip's own settings do not lead
    to it. With `install=False` a missing runtime is a `UserError`.
    """
    for version in PYTHONS:
        if _is_complete(environment := _environment(version)):
            return environment / "bin" / "python"
    if not install:
        raise UserError(f"{cache_dir() / 'runtime'}: the CPU runtime is not installed; `make runtime` installs it")
    interpreter, version = _interpreter(log)
    environment = _environment(version)
    environment.parent.mkdir(parents=True, exist_ok=True)
    waiting = "runtime: another process is installing it; waiting"
    with locking.held(environment.with_suffix(".lock"), lambda: log(waiting)):
        if not _is_complete(environment):
            _install(environment, interpreter, torch_index or os.environ.get("TORCH_INDEX"), log)
    return environment / "bin" / "python"


def assets_dir(
    python: Path | str, within: Callable[[Path], Sequence[str]] | None = None, script: Path = MAKE_ASSETS
) -> Path:
    """The tiny model and toy data, made by `python` where they are missing (seconds).

    `within` gives the command that enters a container in which their directory can be written to; `script` is what
    makes them, from what lies beside it.
    """
    made_of = b"".join(path.read_bytes() for path in dict.fromkeys((MAKE_ASSETS, script)))
    assets = cache_dir() / "tiny" / hashlib.sha256(made_of).hexdigest()[:16]
    if not assets.is_dir():
        assets.parent.mkdir(parents=True, exist_ok=True)
        command = [*(within(assets.parent) if within else ()), str(python), str(script), str(assets)]
        made = subprocess.run(command, capture_output=True, text=True, env=_clean_environment())
        if made.returncode != 0:
            lines = made.stderr.strip().splitlines() or ["no message"]
            raise UserError(f"{assets}: the tiny assets could not be made: {lines[-1]}")
    return assets


def _environment(version: str) -> Path:
    key = hashlib.sha256(f"{version} {platform.machine()}\n".encode())
    for lock in (PACKAGES_LOCK, TORCH_LOCK):
        key.update(lock.read_bytes())
    return cache_dir() / "runtime" / key.hexdigest()[:16]


def _is_complete(environment: Path) -> bool:
    # The second part: the interpreter behind the environment may have been removed since.
    return (environment / STAMP).is_file() and os.access(environment / "bin" / "python", os.X_OK)


def _interpreter(log: Log) -> tuple[Path, str]:
    """A Python that verl and vLLM have wheels for, able to make virtual environments."""
    without_venv = []
    for version in PYTHONS:
        found = shutil.which(f"python{version}")
        # Asked, not trusted: the name may be a version manager's stub without that version.
        if not found or not _runs(
            found, f"import sys; assert sys.version_info[:2] == {tuple(map(int, version.split('.')))}"
        ):
            continue
        if _runs(found, "import ensurepip, venv"):
            return Path(found), version
        without_venv.append((Path(found), version))
    for python, version in without_venv:
        package = f"python{version}-venv"
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise UserError(f"{python}: cannot make virtual environments; install the system package {package}")
        log(f"runtime: apt-get install {package}")
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        )
        if done.returncode == 0 and _runs(str(python), "import ensurepip, venv"):
            return python, version
        raise UserError(f"{python}: cannot make virtual environments, and `{' '.join(command)}` failed")
    raise UserError(f"PATH: no Python for the CPU runtime; allowed are {', '.join('python' + v for v in PYTHONS)}")


def _runs(python: str, code: str) -> bool:
    return subprocess.run([python, "-c", code], capture_output=True, env=_clean_environment()).returncode == 0


def _clean_environment() -> dict[str, str]:
    """This process' environment without what would lead another Python astray."""
    astray = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"}
    return {name: value for name, value in os.environ.items() if name not in astray}


def _install(environment: Path, interpreter: Path, torch_index: str | None, log: Log) -> None:
    started = time.monotonic()
    if environment.exists():
        log("runtime: removing a half-made environment")
        shutil.rmtree(environment)
    free = shutil.disk_usage(environment.parent).free
    if free < NEEDED_BYTES:
        raise UserError(
            f"{environment.parent}: {free / 1e9:.1f} GB free, the CPU runtime needs {NEEDED_BYTES / 1e9:.0f} GB "
            "while it is installed; set DSV4KIT_CACHE to a directory with room"
        )
    log(f"runtime: installing into {environment} with {interpreter} (about 3 GB, some minutes)")
    made = subprocess.run(
        [interpreter, "-m", "venv", environment], capture_output=True, text=True, env=_clean_environment()
    )
    if made.returncode != 0:
        raise UserError(f"{environment}: `{interpreter} -m venv` failed: {(made.stdout + made.stderr).strip()[-200:]}")

    index = ["--index-url", torch_index] if torch_index else []
    _pip(environment, "torch", ["--requirement", str(TORCH_LOCK), *index], log)
    _require_cpu_torch(environment)
    _pip(environment, "packages", ["--require-hashes", "--requirement", str(PACKAGES_LOCK)], log)

    seconds = round(time.monotonic() - started)
    stamp = environment / f"{STAMP}.new"
    stamp.write_text(json.dumps({"python": str(interpreter), "seconds": seconds}) + "\n")
    stamp.rename(environment / STAMP)  # last: an environment without it does not exist for anyone
    log(f"runtime: ready after {seconds} s")


def _require_cpu_torch(environment: Path) -> None:
    """Refuses torch for CUDA: without its libraries (which CPU does not want) it cannot even be imported."""
    # Read from its file, because torch's own dependencies are not there yet.
    built_for = "runpy.run_path(sysconfig.get_path('purelib') + '/torch/version.py')['cuda']"
    if not _runs(str(environment / "bin" / "python"), f"import runpy, sysconfig; assert {built_for} is None"):
        raise UserError(
            f"{TORCH_LOCK.name}: pip found a torch that does not work on CPU alone; "
            "set TORCH_INDEX to a package index with its +cpu wheels"
        )


def _pip(environment: Path, what: str, arguments: list[str], log: Log) -> None:
    """One `pip install`: all output to `install.log`, a line now and then to `log`."""
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--no-input", "--progress-bar=off"]
    scratch = environment / "tmp"  # /tmp is often small, or memory
    scratch.mkdir(exist_ok=True)
    log_file = environment / "install.log"
    total = sum(line[0].isalpha() for line in _lines_after(arguments, "--requirement"))
    collected, last = 0, "no message"
    with log_file.open("a") as full:
        process = subprocess.Popen(
            [*pip, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_clean_environment() | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        assert process.stdout is not None
        for line in process.stdout:
            full.write(line)
            if line.startswith("Collecting "):
                collected += 1
                if collected % 50 == 0:
                    log(f"runtime: {what}: {collected} of {total} fetched")
            elif line.startswith("Installing collected packages"):
                log(f"runtime: {what}: unpacking and compiling")
            elif line.startswith("ERROR"):
                last = line.strip()
        code = process.wait()
    shutil.rmtree(scratch, ignore_errors=True)
    if code != 0:
        raise UserError(f"{log_file}: pip could not install {what} (exit {code}): {last}")


def _lines_after(arguments: list[str], option: str) -> list[str]:
    path = Path(arguments[arguments.index(option) + 1])
    return [line for line in path.read_text().splitlines() if line]
