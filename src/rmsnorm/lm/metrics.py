"""What a run measures, as lines of JSON and for TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rmsnorm.lm.checkpoint import write_atomically

FILE = "metrics.jsonl"
_TENSORBOARD = "tensorboard"


class Metrics:
    """Writes ``metrics.jsonl`` and, if asked to, ``tensorboard/``.

    Args:
        run: the run's folder.
        step: the step that the run goes on from. Later lines are those of updates that a process
            which was killed made after its last checkpoint; they are removed, and so is a line that
            was not written to its end.
        tensorboard: write for TensorBoard, too.

    Raises:
        ModuleNotFoundError: ``tensorboard`` is true, and it is not installed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     metrics = Metrics(Path(name), 0)
        ...     metrics.write({"step": 1, "loss": 7.5})
        ...     metrics.write({"step": 2, "loss": 7.25})
        ...     metrics.close()
        ...     Metrics(Path(name), 1).close()
        ...     read(Path(name))
        [{'step': 1, 'loss': 7.5}]
    """

    def __init__(self, run: Path, step: int, *, tensorboard: bool = False) -> None:
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = step + 1 if (run / _TENSORBOARD).is_dir() else None
            self._writer = SummaryWriter(str(run / _TENSORBOARD), purge_step=purge)
        path = run / FILE
        kept = "".join(_line(entry) for entry in read(run) if entry["step"] <= step)
        write_atomically(path, kept)
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add a line; ``entry`` has a ``step``."""
        # One write of one line: a process that is killed leaves all of it or a part of one line.
        self._file.write(_line(entry))
        self._file.flush()
        if self._writer is not None:
            for name, value in entry.items():
                self._show(name, value, entry["step"])

    def _show(self, name: str, value: Any, step: int) -> None:
        if isinstance(value, str):
            self._writer.add_text(name, value, step)
        elif isinstance(value, list):
            for number, part in enumerate(value):
                self._writer.add_scalar(f"{name}/{number}", part, step)
        elif name != "step":
            self._writer.add_scalar(name, value, step)

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._file.fileno())
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``; one that was not written to its end is left out."""
    path = run / FILE
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            found.append(entry)
    return found


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"
