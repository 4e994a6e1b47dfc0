"""What the rules look at, and what they answer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4kit.config.loading import Resolved, validate
from dsv4kit.config.schema import Settings
from dsv4kit.config.site import Site
from dsv4kit.config.tree import assign
from dsv4kit.plugin.found import PackageFacts
from dsv4kit.verl_keys.features import Features, features_of

if TYPE_CHECKING:
    from dsv4kit.feasibility.data_checks import DataReport


class Refusal(NamedTuple):
    """One thing that cannot work: the setting, its value, why, and what would do.

    `said`: the setting as the user wrote it, or the file it stands in; empty where `why` names it already.
    """

    key: str
    value: object
    said: str
    why: str
    instead: str = ""

    @property
    def line(self) -> str:
        """The one line a user reads."""
        text = f"{self.said}: {self.why}" if self.said else self.why
        return f"{text}; {self.instead}" if self.instead else text


class ImageFacts(NamedTuple):
    """What is known of the image a run would use: its processor, and the manifest the kit's build left in it, if any.

    `readable_format`: the format of manifests that this kit reads.
    """

    path: str
    architecture: str | None
    manifest: Mapping[str, Any] | None
    readable_format: int


class Case:
    """One run that is asked for.

    `sources` says where each setting came from; `image` is None where there is none, or where nothing here can look
    into it. `first_step` is the step a resume begins with. A run that has been `submitted` has its verl keys written
    down already, for the verl in its own image: those are not asked about again.
    """

    def __init__(
        self,
        settings: Settings,
        sources: Mapping[str, str],
        site: Site,
        image: ImageFacts | None = None,
        first_step: int = 0,
        submitted: bool = False,
    ) -> None:
        self.settings, self.sources, self.site, self.image = settings, sources, site, image
        self.first_step, self.submitted = first_step, submitted

    @functools.cached_property
    def features(self) -> Features:
        """What the image's verl offers."""
        return features_of(self.settings.engine.verl)

    @functools.cached_property
    def found(self) -> PackageFacts | None:
        """What the image's build found its packages to do; None where that is not known here."""
        facts = ((self.image.manifest if self.image else None) or {}).get("facts")
        return (
            PackageFacts(**{k: v for k, v in facts.items() if k in PackageFacts._fields})
            if isinstance(facts, dict)
            else None
        )

    @functools.cached_property
    def data(self) -> DataReport:
        """What the data files show from here."""
        from dsv4kit.feasibility.data_checks import examine

        return examine(self.settings, self.sources)

    def said(self, key: str, value: object) -> str:
        """The setting as the user wrote it, or where it stands."""
        source = self.sources.get(key)
        if source is None:
            return f"{key}={value}"
        if source.startswith(("SET ", "VERL ")):
            return f"{source}={value}"
        return source if "=" in source else f"{source}: {key}={value}"

    def refusal(self, key: str, value: object, why: str, instead: str = "") -> Refusal:
        """A refusal of one setting."""
        return Refusal(key, value, self.said(key, value), why, instead)

    def verl(self, key: str) -> Any:
        """A raw key of verl's; None where it is not given."""
        return self.settings.verl.get(key)

    def changed(self, changes: Mapping[str, object]) -> Case:
        """The case with these settings as if the user had SET them. Raises UserError for a value no setting takes."""
        tree, sources = self.settings.model_dump(), dict(self.sources)
        for key, value in changes.items():
            tree = assign(tree, key, value, f"SET {key}", sources)
        resolved = Resolved(validate(Settings, tree, sources), sources)
        return Case(resolved.settings, sources, self.site, self.image, self.first_step, self.submitted)
