"""What ``deltafin bench`` prints: tables, a plot, CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from deltafin.cli.text import columns

if TYPE_CHECKING:
    from deltafin.bench import KernelSpeed, Report, Speed

BAR = 40
"""Characters of the longest bar."""


def speed_table(report: "Report") -> str:
    """Return a model's speeds, and a bar for the time of a token at each context."""
    threads = f"{report.threads} thread{'s' if report.threads > 1 else ''}"
    head = f"{report.model}, {report.backend}, {threads}, memory {report.read_gbs:.1f} GB/s"
    if report.place != "cpu":
        head += f", --place {report.place}, GPU memory {report.gpu_gbs:,.0f} GB/s"
    if report.elsewhere:
        head += f"\nexperts that are not on the GPU: {report.elsewhere}"
    header = ("context", "prefill tok/s", "decode tok/s", "predicted", "share", "MB/token", "GB/s")
    cells = [
        (
            row.context,
            "-" if row.prefill_tok_s is None else f"{row.prefill_tok_s:.1f}",
            f"{row.decode_tok_s:.1f}",
            f"{row.predicted_tok_s:.1f}",
            f"{row.share:.0%}",
            f"{row.bytes_per_token / 1e6:.1f}",
            f"{row.gbs:.2f}",
        )
        for row in report.rows
    ]
    times = [1000 / row.decode_tok_s for row in report.rows]
    bars = [
        (row.context, f"{time:.2f} ms", "█" * max(1, round(BAR * time / max(times))))
        for row, time in zip(report.rows, times, strict=True)
    ]
    plot = columns([("context", "a token", ""), *bars], right=(0, 1))
    header_of_parts = ("part", "a token", "MB", "GB/s")
    parts = [(p.part, f"{p.milliseconds:.3f} ms", f"{p.bytes / 1e6:.1f}", f"{p.gbs:.2f}") for p in report.parts]
    table = columns([header_of_parts, *parts], right=(1, 2, 3))
    return f"{head}\n\n{columns([header, *cells], right=range(7))}\n\n{plot}\n\n{table}"


def kernel_table(rows: Sequence["KernelSpeed"]) -> str:
    """Return the speed of every operation beside its limit."""
    header = ("kernel", "shape", "weights", "rows", "GB/s", "limit", "share")
    cells = [
        (r.kernel, r.shape, r.weights, r.rows, f"{r.gbs:.2f}", f"{r.limit_gbs:.1f}", f"{r.share:.0%}") for r in rows
    ]
    return columns([header, *cells], right=(3, 4, 5, 6))


def as_csv(rows: Sequence["Speed"] | Sequence["KernelSpeed"]) -> str:
    """Return rows as CSV under a line of their names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(f.name for f in fields(rows[0]))
    writer.writerows(asdict(row).values() for row in rows)
    return text.getvalue().rstrip("\n")
