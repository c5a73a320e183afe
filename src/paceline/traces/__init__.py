"""Traces: what each layer's router chose, recorded, imported, read, and tried out on."""

from paceline.traces.folder import TraceWriter, save_trace
from paceline.traces.format import TraceError
from paceline.traces.importers.source import ImportOptions
from paceline.traces.open import is_trace, open_trace, sample, samples
from paceline.traces.trace import Trace

__all__ = [
    "ImportOptions",
    "Trace",
    "TraceError",
    "TraceWriter",
    "is_trace",
    "open_trace",
    "sample",
    "samples",
    "save_trace",
]
