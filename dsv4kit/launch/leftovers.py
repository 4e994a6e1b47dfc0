"""What submissions that were killed left beside the runs: directories that never became one."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

# As `temporary_name` gives them: .<run>.<host>.<pid>.<thread>
_OF_THIS_HOST = re.compile(rf"\..+\.{re.escape(os.uname().nodename)}\.(?P<pid>[0-9]+)\.[0-9]+")
_OF_ANY_HOST = re.compile(r"\..+\..+\.[0-9]+\.[0-9]+")
# Whether a process of another host lives nobody can say here; no submission takes a day.
_AGE_S = 86_400


def sweep(runs: Path) -> list[str]:
    """Deletes them; a readable line each."""
    done = []
    for path in sorted(runs.glob(".*")):
        if _OF_ANY_HOST.fullmatch(path.name) and (path / "kit").is_dir() and _is_left(path):
            shutil.rmtree(path, ignore_errors=True)
            done.append(f"deleted {path}: left by a submission that was killed")
    return done


def _is_left(path: Path) -> bool:
    status = path.lstat()
    if status.st_uid != os.getuid() or path.is_symlink():
        return False
    own = _OF_THIS_HOST.fullmatch(path.name)
    if own is None:
        return time.time() - status.st_mtime > _AGE_S
    try:
        os.kill(int(own["pid"]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
