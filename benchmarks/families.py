"""Every family in every profile: the graph against torch, as an export compares it.

    python benchmarks/families.py [--models llama gemma3_text …]

The models are small and random, with large weights, so that a wrong scale, norm, mask or rope shows: the tests' own
(tests/export/graph_models.py). A cell is the largest difference of a logit in standard deviations, over every step and
all text, and the share of positions of text with the same proposal at temperature 0.8.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import ROOT
from rich.console import Console
from rich.table import Table

from paceline.core.errors import PacelineError
from paceline.core.lm.loading import wrap
from paceline.core.manifest import Profile
from paceline.export import graph, parity
from paceline.export.parity_cases import ROWS
from paceline.export.parity_figures import Extent
from paceline.export.parity_subjects import GraphSubject, Shape, TorchSubject

sys.path.append(str(ROOT / "tests" / "export"))
from graph_models import CONTEXT, MODELS, TOKENIZER, make, tokens

TEXTS = [tokens(CONTEXT, 100 + seed) for seed in range(8)]


class Cell(NamedTuple):
    """A column: what is exported."""

    profile: Profile
    dtype: str

    def __str__(self) -> str:
        return f"{self.profile} {self.dtype}"


CELLS = (
    Cell("gqa", "float32"),
    Cell("gqa", "float16"),
    Cell("concat", "float32"),
    Cell("static-compat", "float32"),
    Cell("static-compat", "float16"),
    Cell("static-native", "float16"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("model", *map(str, CELLS), title="difference in standard deviations, same proposals at 0.8")
    failed = 0
    for name in options.models:
        module = make(name)
        cells = []
        for cell in CELLS:
            try:
                cells.append(compared(module, cell))
            except PacelineError as error:
                failed += 1
                cells.append(str(error))
        table.add_row(name, *cells)
        print(name, *cells, sep=" | ", flush=True)
    Console(width=160).print(table)
    print(f"{len(options.models) * len(CELLS)} cells, {failed} differ or cannot be had")
    return 1 if failed else 0


def compared(module: Any, cell: Cell) -> str:
    """The text of one cell."""
    with tempfile.TemporaryDirectory() as folder:
        info = graph.write(module, Path(folder), cell.profile, cell.dtype, CONTEXT, TOKENIZER)
        # A copy: what runs in the arena has another attention function than the model that the next graph is read off.
        model = wrap(deepcopy(module), kv_slots=ROWS * 256, max_context=CONTEXT, fused=False)
        reference = TorchSubject(model, rows=ROWS, max_context=CONTEXT, vocabulary_size=TOKENIZER)
        shape = Shape(info.layers, info.kv_heads, CONTEXT, info.head_dim, np.dtype(cell.dtype))
        subject = GraphSubject(info.path, cell.profile, shape, rows=ROWS)
        extent = Extent(info.layers, CONTEXT, info.multi_token_batch, cell.dtype)
        found = parity.check(reference, subject, extent, TEXTS)
        return f"{found.logit_difference:.0e}, {found.agreement['0.8']:.1%}"


if __name__ == "__main__":
    sys.exit(main())
