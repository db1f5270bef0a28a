"""Processed images that a process keeps: engine, trainer and reward of one process compute each of them once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from modeling.images.families import Grid

MOST_KEPT = 2**29
"""Bytes of processed images that a process keeps."""


@dataclass(frozen=True, slots=True)
class CachedImage:
    """Result of an image processor for one image. The tensors are not to be changed."""

    tensors: dict[str, Tensor]
    """Inputs of the vision part for this image alone."""
    cut: Grid
    """Rows and columns into which it was cut."""

    @property
    def bytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class ImageCache:
    """Processed images by the settings of their processor and their hash; what was not used for longest goes."""

    def __init__(self, most: int) -> None:
        """Begin without any; most: bytes that are kept, beside the image that was used last."""
        self._most, self._bytes = most, 0
        self._kept: OrderedDict[tuple[str, str], CachedImage] = OrderedDict()
        self._lock = Lock()

    def find(self, settings: str, name: str) -> CachedImage | None:
        """Return an image that is kept, and count that as its use."""
        with self._lock:
            found = self._kept.get((settings, name))
            if found is not None:
                self._kept.move_to_end((settings, name))
            return found

    def add(self, settings: str, name: str, made: CachedImage) -> None:
        """Keep an image, and drop others where there are too many."""
        with self._lock:
            if (settings, name) in self._kept:  # another thread was faster
                return
            self._kept[settings, name] = made
            self._bytes += made.bytes
            while self._bytes > self._most and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.bytes


CACHE = ImageCache(MOST_KEPT)
"""Those of this process."""
