"""Folders, object stores and web servers, opened by an address through fsspec."""

from __future__ import annotations

from typing import Any

from core.errors import UserError, first_line, name_error
from core.hub import prepare_hub

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""Package that reads a protocol, where fsspec and the hub's client do not."""


class StoreUnreachable(UserError):
    """Store that did not open. A later attempt may succeed, unlike those of the other errors of `open_store`."""


def is_remote(path: str) -> bool:
    """Tell whether a path has a protocol, such as s3://."""
    return "://" in path


def open_store(url: str, key: str) -> tuple[Any, str]:
    """Return the store of an address, and the path in it. Raises UserError, which begins with `key`.

    The UserError is StoreUnreachable if another attempt may succeed.
    """
    import fsspec
    import fsspec.core

    protocol = url.split("://")[0]
    if protocol == "hf":
        prepare_hub(key)
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = PACKAGES.get(protocol)
        fix = f"pip install {package}" if package else first_line(error)
        raise UserError(f"{key}: {protocol}:// needs a package that is not installed: {fix}") from error
    except ValueError as error:
        known = ", ".join(f"{name}://" for name in ("s3", "gs", "hf", "https", "memory"))
        raise UserError(f"{key}: fsspec knows no protocol {protocol}://: use one that it knows, as {known}") from error
    except Exception as error:  # a border: a store may look for credentials here
        raise StoreUnreachable(f"{key} cannot be reached: {name_error(error)}") from error


def find_cause(error: BaseException) -> BaseException:
    """Return the error that a store's error was raised from: fsspec says of a silent server that a file is missing."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
