"""What the containers of a run see of the host, each path under its own name.

The run directory, its checkpoints, the data, the weights and a reward function of one's own come by themselves; the
site adds the rest. Symbolic links are followed: a snapshot in a hub's cache, for one, is a directory of links to
elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsv4kit.config.schema import Settings
from dsv4kit.config.site import Site
from dsv4kit.config.site_values import mountable
from dsv4kit.errors import UserError
from dsv4kit.run.directory import RunDir


def of(settings: Settings, site: Site, run: RunDir) -> list[str]:
    """`SRC:DST[:ro]` for `--container-mounts`, parents first. Raises UserError for a path that cannot be mounted."""
    written = [str(run.path), *filter(None, [settings.checkpoint.directory])]
    if site.scratch_dir != "/tmp":  # a container's own /tmp is node-local already
        written.append(site.scratch_dir)
    wanted: dict[str, bool] = {}
    for path in written:
        wanted |= dict.fromkeys(_with_targets([path]), True)
    for path in _with_targets(read_only(settings)):
        wanted.setdefault(path, False)
    sites = [_full(mount) for mount in site.container.mounts]
    covered = {_source(mount): not mount.endswith(":ro") for mount in sites if _source(mount) == mount.split(":")[1]}
    own: list[str] = []
    for path in sorted(wanted):
        writable = wanted[path]
        above = [covered[parent] for parent in _self_and_parents(path) if parent in covered]
        if above and (above[0] or not writable):
            continue
        _check(path)
        own.append(f"{path}:{path}" + ("" if writable else ":ro"))
        covered[path] = writable
    return [*sites, *own]


def read_only(settings: Settings) -> Iterator[str]:
    """Paths the trainer only reads; files by their directory."""
    yield from filter(None, [settings.model.path, settings.checkpoint.dist_checkpoint_path])
    files = [*(settings.data.train_files or []), *(settings.data.val_files or [])]
    if settings.reward.function_path and "://" not in settings.reward.function_path:
        files.append(settings.reward.function_path)
    for file in files:
        yield file if os.path.isdir(file) else os.path.dirname(file)


def _with_targets(paths: Iterable[str]) -> Iterator[str]:
    """The paths; where they are links, or hold links to elsewhere, what those lead to as well."""
    for path in paths:
        real = os.path.realpath(path)
        yield path
        yield real
        try:
            entries = list(os.scandir(real))
        except OSError:  # not there, or not a directory
            continue
        for entry in entries:
            target = os.path.dirname(os.path.realpath(entry.path)) if entry.is_symlink() else real
            if not f"{target}/".startswith(f"{real}/"):
                yield target


def _self_and_parents(path: str) -> list[str]:
    return [path, *map(str, Path(path).parents)]


def _full(mount: str) -> str:
    """A site's mount with its destination written out."""
    return mount if ":" in mount else f"{mount}:{mount}"


def _source(mount: str) -> str:
    return mount.partition(":")[0]


def _check(path: str) -> None:
    try:
        mountable(path)
    except ValueError as error:
        raise UserError(f"{path!r}: {error}") from None
