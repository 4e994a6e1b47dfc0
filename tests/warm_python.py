"""A Python that has loaded slow packages already, and runs each script in a fork of itself.

A dozen tests need a process of their own with torch, transformers and Ray in it, whose import is most of its time.
As a program (`warm_python.py MODULE...`) it reads a JSON object per line, and answers with the script's exit status.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What verl imports of others. Nothing that the kit's plugins patch or look out for is among it.
PACKAGES = ("torch", "torch._dynamo", "tensordict", "transformers", "datasets", "ray", "pandas", "hydra", "fastapi")


class WarmPython:
    """The process, to be used with `with`; `interpreter` is a Python that has `packages`."""

    def __init__(self, interpreter: str | Path, packages: Sequence[str] = PACKAGES) -> None:
        self._process = subprocess.Popen(
            [interpreter, "-W", "ignore", __file__, *packages],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(
        self, script: str | Path, *arguments: object, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script, code or file, as `python SCRIPT ARGUMENTS` would, with `env` added to the environment."""
        name, code = (str(script), script.read_text()) if isinstance(script, Path) else ("-c", script)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            asked = {"code": code, "argv": [name, *map(str, arguments)], "env": {**os.environ, **(env or {})}}
            print(json.dumps({**asked, "out": str(out), "err": str(err)}), file=self._process.stdin, flush=True)
            status = self._process.stdout.readline()
            assert status, "the warm Python has ended; what it said is on stderr"
            return subprocess.CompletedProcess(asked["argv"], int(status), out.read_text(), err.read_text())


def serve(packages: Sequence[str]) -> None:
    """Forks for each line of the input, until there is none."""
    import gc

    gc.disable()
    for package in packages:
        importlib.import_module(package)
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a package prints is not part of the answer
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_run(**json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _run(code: str, argv: list[str], env: dict[str, str], out: str, err: str) -> int:
    os.environ.clear()
    os.environ.update(env)
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.argv = argv
    here = [str(Path(argv[0]).parent)] if argv[0] != "-c" else []
    sys.path[:1] = [*here, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    status: Any = 0
    try:
        exec(compile(code, argv[0], "exec"), {"__name__": "__main__", "__file__": argv[0]})
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else int(status is not None)


if __name__ == "__main__":
    serve(sys.argv[1:])
