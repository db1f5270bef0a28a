"""Find the sampler that `data.sampler` names."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from configs.load import validate
from core.errors import UserError
from core.loading import FileSpec, classes_below, load_class, resolve
from data_feeds.samplers.base import Sampler

PACKAGE = "data_feeds.samplers"


def find_sampler(given: str | Mapping[str, Any]) -> tuple[FileSpec, Sampler]:
    """Return the file and the sampler of a name, a path, or settings with `name` or `file`.

    Raises UserError if there is no such sampler, or a setting is wrong.
    """
    if isinstance(given, str):
        given = {"file" if given.endswith(".py") or "/" in given else "name": given}
    name, file = given.get("name"), given.get("file")
    if bool(name) == bool(file) or not isinstance(name or file, str):
        raise UserError("data.sampler needs either a name (of a module of data_feeds/samplers/) or a file (a path)")
    spec = resolve(str(name or file), PACKAGE, offers=_is_sampler, key="data.sampler")
    sampler: Sampler = validate(load_class(spec, Sampler, key="data.sampler"), dict(given), prefix="data.sampler.")
    return spec, sampler


def _is_sampler(module: ModuleType) -> bool:
    return len(classes_below(module, Sampler)) == 1
