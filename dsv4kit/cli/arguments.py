"""argparse with the kit's manners: an error is one line with the nearest valid name, and exit code 2."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import NoReturn

from dsv4kit.cli.variables import Variable
from dsv4kit.errors import UserError, nearest


class Parser(argparse.ArgumentParser):
    """Raises UserError instead of printing the usage; `arguments` is called with the parser when it is first used."""

    def __init__(
        self, *args: object, arguments: Callable[[argparse.ArgumentParser], None] | None = None, **kwargs: object
    ) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # type: ignore[arg-type]
        self._arguments = arguments

    def error(self, message: str) -> NoReturn:
        hint = ""
        if unknown := re.match(r"unrecognized arguments: (\S+)", message):
            hint = nearest(unknown[1].partition("=")[0], self._option_string_actions)
        elif choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            hint = nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        verb = self.prog.partition(" ")[2]
        raise UserError(f"{verb + ': ' if verb else ''}{message}{hint}")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Unknown options are reported by the verb's own parser, which knows the valid ones."""
        if self._arguments:
            self._arguments(self)
            self._arguments = None
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed, rest


def add_variables(parser: argparse.ArgumentParser, variables: Iterable[Variable]) -> None:
    """One option per variable; its value lands under the variable's lower-case name, None where it was not given."""
    for variable in variables:
        kind: dict[str, object] = {"help": f"{variable.help} (make: {variable.name})", "dest": variable.dest}
        if variable.flag:
            kind |= {"action": argparse.BooleanOptionalAction, "default": None}
        elif variable.many:
            kind |= {"action": "append", "default": [], "metavar": "KEY=VALUE"}
        else:
            kind |= {"metavar": variable.name}
        parser.add_argument(variable.option, **kind)  # type: ignore[arg-type]
