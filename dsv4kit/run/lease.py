"""Which job may train a run: `lease.json` in its directory, held by one attempt at a time.

`resume` uses the same for itself, under another name.

Slurm starts one segment of a chain at a time, but a requeued job, a second chain or a partitioned node that is still at
work can bring a second trainer to the same checkpoints. File locks cannot be trusted on NFS and Lustre, so the owner
rewrites the file at every heartbeat, and whoever wants it watches: a lease that changes has an owner that is alive.
Nothing is concluded from the age of a heartbeat, because two nodes' clocks need not agree.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dsv4kit.run.files import read_json, write_json

NAME = "lease.json"
HEARTBEAT_S = 5.0
# Above what a failover of a shared file system usually lets a writer wait; an owner that died costs its successor this.
DEAD_AFTER_S = 60.0
# Longer than a shared file system needs to show a file to its other clients once it was synced and renamed.
SETTLE_S = 2.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Owner:
    """An attempt that holds, or wants, the lease."""

    job_id: str
    segment: int
    attempt: int
    host: str


class LeaseHeldError(Exception):
    """Another attempt holds the lease, and its heartbeat goes on."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


class Lease:
    """The lease as one attempt sees it: `take` it, look at `lost` while it trains, `give_back`."""

    def __init__(
        self,
        run_dir: Path,
        owner: Owner,
        *,
        name: str = NAME,
        heartbeat_s: float = HEARTBEAT_S,
        dead_after_s: float = DEAD_AFTER_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._path = run_dir / name
        self._own = {key: str(value) for key, value in asdict(owner).items()}
        self._heartbeat_s, self._dead_after_s, self._settle_s = heartbeat_s, dead_after_s, settle_s
        self._beat = 0
        self._taken_over_by: str | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def take(self, stop: Callable[[], bool] = lambda: False, told: Callable[[str], None] = lambda owner: None) -> None:
        """Returns once the lease is this attempt's and its heartbeat has begun; at once where nobody holds it.

        A lease that another attempt left behind is watched for `dead_after_s` seconds first; `told` hears of its owner
        before. Raises LeaseHeldError when it changes in that time, or when another attempt takes it at the same moment;
        also when `stop` says so.
        """
        while (found := self._read()) is not None and (other := self._other(found)) is not None:
            told(other)
            if self._is_silent(found, other, stop):
                self._overwrite()
                break
        else:
            if not self._create():
                return self.take(stop, told)
        self._thread.start()
        return None

    @property
    def lost(self) -> str | None:
        """The attempt that took the lease from this one, which must not train any longer; None while it is held."""
        return self._taken_over_by

    def give_back(self) -> None:
        """Ends the heartbeat and removes the lease, if it is still this attempt's."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._dead_after_s)
        content = self._read()
        if self._beat and content is not None and self._other(content) is None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _is_silent(self, found: dict[str, object], other: str, stop: Callable[[], bool]) -> bool:
        """Whether the lease stays as it was found for `dead_after_s`; False when it was given back meanwhile."""
        since = time.monotonic()
        while time.monotonic() - since < self._dead_after_s:
            if stop():
                raise LeaseHeldError(other)
            time.sleep(min(_POLL_S, self._heartbeat_s))
            now = self._read()
            if now is None:
                return False
            if now != found:
                raise LeaseHeldError(self._other(now) or other)
        return True

    def _create(self) -> bool:
        """Makes the file where there is none; False if another attempt was faster.

        A hard link is the one way to create a file that fails on every shared file system if it exists. Where there are
        no hard links, the file is written, and read again after a while.
        """
        mine = self._path.with_name(f"{self._path.name}.{self._own['job_id']}.{self._own['attempt']}")
        self._write(mine)
        try:
            os.link(mine, self._path)
        except FileExistsError:
            content = self._read()
            return content is not None and self._other(content) is None  # an NFS server may answer twice
        except OSError:
            self._overwrite()
        finally:
            mine.unlink(missing_ok=True)
        return True

    def _overwrite(self) -> None:
        self._write(self._path)
        time.sleep(self._settle_s)  # of two that write at the same time the later one wins, and both see it
        if (other := self._other(self._read())) is not None:
            raise LeaseHeldError(other)

    def _renew(self) -> None:
        while not self._done.wait(self._heartbeat_s):
            with contextlib.suppress(OSError):  # the file system is away for a while: the next beat tries again
                content = self._read()
                if content is not None and (other := self._other(content)) is not None:
                    self._taken_over_by = other
                    return
                self._write(self._path)

    def _write(self, path: Path) -> None:
        self._beat += 1
        write_json(path, {**self._own, "beat": self._beat, "time": round(time.time(), 1)})

    def _read(self) -> dict[str, object] | None:
        """The lease; None where there is none, and empty where it is damaged."""
        content = read_json(self._path)
        if isinstance(content, dict):
            return content
        return {} if self._path.exists() else None

    def _other(self, content: dict[str, object] | None) -> str | None:
        """Who holds the lease in `content`, if that is not this attempt."""
        if content is None:
            return None
        keys = self._own.keys()
        if {key: content.get(key) for key in keys} == self._own:
            return None
        shown = {key: str(content.get(key, "?")) for key in keys}
        return "job {job_id} on {host} (segment {segment}, attempt {attempt})".format(**shown)
