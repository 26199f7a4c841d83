"""How a longer task says what it is doing."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]
"""Called with a few words whenever a longer step begins."""
