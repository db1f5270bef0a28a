"""Cache of processed images: engine, trainer and reward in the same process compute each image once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from modeling.images.families import Grid

MOST_KEPT = 2**29
"""Cache size in bytes."""


@dataclass(frozen=True, slots=True)
class CachedImage:
    """Result of an image processor for an image. The tensors must not be changed."""

    tensors: dict[str, Tensor]
    """Inputs of the vision tower for this image alone."""
    cut: Grid
    """Rows and columns into which the image was cut."""

    @property
    def bytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class ImageCache:
    """LRU cache of processed images, by processor settings and image hash."""

    def __init__(self, most: int) -> None:
        """Begin empty. most: maximum bytes, besides the last used image."""
        self._most, self._bytes = most, 0
        self._kept: OrderedDict[tuple[str, str], CachedImage] = OrderedDict()
        self._lock = Lock()

    def find(self, settings: str, name: str) -> CachedImage | None:
        """Return a cached image and mark it as used."""
        with self._lock:
            found = self._kept.get((settings, name))
            if found is not None:
                self._kept.move_to_end((settings, name))
            return found

    def add(self, settings: str, name: str, made: CachedImage) -> None:
        """Add an image, and evict the least recently used if the cache is full."""
        with self._lock:
            if (settings, name) in self._kept:  # another thread was faster
                return
            self._kept[settings, name] = made
            self._bytes += made.bytes
            # The newest image stays even if it alone is too large: the caller is about to use it.
            while self._bytes > self._most and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.bytes


CACHE = ImageCache(MOST_KEPT)
"""Cache of this process."""
