"""After the first steps of an attempt the nodes agree who keeps which of the kernels that were compiled.

Node 0 asks for names, every node tells its own, node 0 shares them out so that each file is kept once, and every node
writes its share (run/kernels.py has the files). A thread on each node does it beside the training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dsv4kit.node.attempt import Attempt
from dsv4kit.node.kernel_cache import KernelCache
from dsv4kit.run import kernels, metrics
from dsv4kit.run.kernels import KernelFiles

_POLL_S = 1.0
# The first step compiles nearly everything; the second has the first weight update behind it.
_AFTER_STEPS = 2
# The others are waited for so long; what a node does not name by then is compiled again.
_NAMES_S = 30.0


class KernelExchange:
    """The part of the node `host` in it, in one attempt. `tell`: takes readable lines for whoever looks at the run."""

    def __init__(
        self, cache: KernelCache, attempt: Attempt, host: str, nodes: int, tell: Callable[[str], None]
    ) -> None:
        self._cache, self._attempt, self._nodes, self._tell = cache, attempt, nodes, tell
        self._files = KernelFiles(attempt.files, host)
        self._restored, self._driver_ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kernels", daemon=True)

    def begin(self) -> None:
        """Begins to put in place what is kept."""
        self._thread.start()

    def wait_restored(self) -> None:
        """Returns once the kernels are in place."""
        self._restored.wait()

    def close(self, limit_s: float) -> None:
        """The driver has ended: returns at once where nobody has asked for names, else when all is done, or then."""
        self._driver_ended.set()
        self._thread.join(limit_s)

    def _run(self) -> None:
        try:
            for line in self._cache.restore():
                self._tell(line)
        except OSError as error:
            self._tell(f"compiled kernels are not there: {error}")
        finally:
            self._restored.set()
        try:
            self._exchange()
        except OSError as error:
            self._tell(f"compiled kernels are not kept: {error}")

    def _exchange(self) -> None:
        if self._attempt.leads and self._comes(self._due):
            self._files.ask()
        if not self._comes(self._files.asked):
            return
        compiled = self._cache.new()
        self._files.name(compiled)
        if self._attempt.leads:
            self._share_out()
        deadline = time.monotonic() + 2 * _NAMES_S
        while (share := self._files.share()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._cache.keep({name: compiled[name] for name in share or []}, self._files.bundle_name)

    def _comes(self, event: Callable[[], bool]) -> bool:
        """Waits for it; False where the driver ends first."""
        while not event():
            if self._driver_ended.wait(_POLL_S):
                return event()
        return True

    def _due(self) -> bool:
        trained = [step for step in metrics.read_metrics(self._attempt.files.metrics_file) if step.trained]
        return len(trained) >= _AFTER_STEPS

    def _share_out(self) -> None:
        deadline = time.monotonic() + _NAMES_S
        while len(names := self._files.names()) < self._nodes and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        sharing = kernels.shared_out(names, self._cache.known, self._cache.room_bytes)
        self._files.share_out(sharing.by_host)
        if sharing.files or sharing.without_room:
            self._tell(sharing.line)
        self._cache.known.update(sharing.files)
