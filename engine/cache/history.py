"""How often blocks of the SSD tier were used, kept for the next process. Losing it costs a warm start, no block."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from engine.cache.block import BlockHash

_log = logging.getLogger(__name__)


def save_history(directory: Path, history: Sequence[tuple[BlockHash, int]]) -> None:
    """Keep how often blocks were used, for the next process. Never half a file: it is renamed when it is whole."""
    path = directory / "history.json"
    temporary = path.with_suffix(".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        json.dump([[block_hash.hex(), num_uses] for block_hash, num_uses in history], file)
    temporary.replace(path)


def load_history(directory: Path) -> list[tuple[BlockHash, int]]:
    """What `save_history` kept; empty where there is none, or none that can be read."""
    try:
        rows = json.loads((directory / "history.json").read_text(encoding="ascii"))
        return [(bytes.fromhex(block_hash), int(num_uses)) for block_hash, num_uses in rows]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        _log.warning("the history of the SSD tier cannot be read: %s", error)
        return []
