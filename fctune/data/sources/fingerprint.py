"""What a source holds, as a short text that changes when its rows do."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fctune.data.sources.reader import list_files


def fingerprint_source(path: str) -> str:
    """Digest of the content of a source's files; of the generator's code for ``synthetic:``; the name for ``hf:``.

    A dataset of the hub is told apart by its name and revision alone, so name a revision (``hf:NAME@REVISION``) where
    rows may change under the name.
    """
    if path.startswith("hf:"):
        return path
    digest = hashlib.blake2b(digest_size=16)
    if path.startswith("synthetic:"):
        import fctune.data.synthetic

        files = sorted(str(p) for p in Path(fctune.data.synthetic.__file__).parent.glob("*.py"))
    else:
        files = list_files(path)
    for file in files:
        digest.update(Path(file).name.encode())
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
