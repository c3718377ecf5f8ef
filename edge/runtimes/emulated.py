"""The emulated runtime: a numpy model, such as the toy language, in place of a draft model, at the model's own pace."""

from __future__ import annotations

from paceline.edge.runtimes.base import PackedRuntime


class EmulatedRuntime(PackedRuntime):
    """Figures that come from it are emulated, and are to be labelled so."""
