"""Where references are kept between runs: one file per model, text, engine and cut, under a limit of size.

The folder is `references` in the user's cache folder, or in `$KVRUN_CACHE` as compiled kernels are. When a new file
needs room, those that were not used for longest go first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvrun.errors import KvError
from kvrun.evaluation.stored import Recorder, StoredReference, size_bytes

#: Bytes that all files together may take.
DEFAULT_LIMIT_BYTES = 4 << 30

_SUFFIX = ".reference"


def default_folder() -> Path:
    """`references` in `$KVRUN_CACHE`, else in the user's cache folder."""
    from kvkernels.jit.compiler import cache_folder

    return cache_folder() / "references"


class ReferenceCache:
    """The references on disk.

    limit_bytes: of all files together; 0 keeps none.  say: told, once each, why one is not kept.
    """

    def __init__(
        self, say: Callable[[str], None], *, limit_bytes: int = DEFAULT_LIMIT_BYTES, folder: Path | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self.folder = folder or default_folder()
        self._say, self._said = say, set[str]()

    def say(self, text: str) -> None:
        """Pass a line on, unless it was said before."""
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def path_of(self, key: str) -> Path:
        """Where the reference of a key (`kvrun.identity`) lies, or would."""
        return self.folder / (key + _SUFFIX)

    def find(self, key: str, n_rows: int, n_vocab: int) -> StoredReference | None:
        """The reference of a key, None where there is none that is whole."""
        if not self.limit_bytes:
            return None
        path = self.path_of(key)
        try:
            found = StoredReference(path, n_rows, n_vocab)
            with suppress(OSError):  # a folder that is read-only can still be read
                os.utime(path)  # used now: others go first
            return found
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.say(
                f"{path} cannot be read ({error.strerror or error}), so the reference is computed again; delete it"
            )
            return None
        except KvError as error:
            self.say(str(error))
            return None

    def reserve(self, key: str, n_rows: int, n_vocab: int) -> Path | None:
        """Make room for a reference and say where it goes; None, and a line that says why, where it is not kept."""
        if not self.limit_bytes:
            return None
        needed = size_bytes(n_rows, n_vocab)
        if needed > self.limit_bytes:
            self.say(
                f"the reference takes {_size(needed)}, more than the {_size(self.limit_bytes)} that may be kept, so it "
                "is computed again where it is needed; raise the limit with --references"
            )
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(needed, self.path_of(key))
        except OSError as error:
            self.say(
                f"{self.folder} cannot be used ({error.strerror or error}), so the reference is computed again where "
                "it is needed; name another folder with KVRUN_CACHE"
            )
            return None
        return self.path_of(key)

    def recorder(self, key: str, n_rows: int, n_vocab: int) -> Recorder | None:
        """What writes the reference of a key, None where it is not kept."""
        path = self.reserve(key, n_rows, n_vocab)
        return None if path is None else Recorder(path, n_rows, n_vocab, self.say)

    def _make_room(self, needed: int, keep: Path) -> None:
        files = []
        for path in self.folder.iterdir():
            if _SUFFIX in path.name and path != keep:
                with suppress(FileNotFoundError):  # another process makes room as well
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
        free = self.limit_bytes - needed - sum(size for _, size, _ in files)
        n_gone = 0
        for _, size, path in sorted(files):
            if free >= 0:
                break
            path.unlink(missing_ok=True)
            free, n_gone = free + size, n_gone + 1
        if n_gone:
            self.say(f"references on disk reached {_size(self.limit_bytes)} (--references): the {n_gone} oldest went")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
