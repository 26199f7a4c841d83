"""How a training run tells what it does; without torch, so that a command starts quickly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Watch:
    """Is told what a run does. The methods do nothing; override those of interest."""

    def say(self, words: str) -> None:
        """A longer step begins."""

    def note(self, words: str) -> None:
        """Something to know about."""

    def begin(self, step: int, steps: int | None) -> None:
        """Updates begin after ``step``, or are now known to be ``steps``."""

    def step(self, entry: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl`` about an update."""

    def held_out(self, entry: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl`` about the held-out text."""

    def sample(self, step: int, prompt: str, text: str) -> None:
        """What the model makes of the beginning of the held-out text."""
