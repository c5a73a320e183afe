"""What a server asks of each of its workers, which has a `CappedModel` and may record.

Functions of a worker with `paceline` and `paceline_recording`; answers are JSON-able.
"""

from __future__ import annotations

from typing import Any

from paceline.traces.format import TraceError


def paceline_describe(self: Any) -> dict[str, Any]:
    """Return the policy in force in this worker and its counts, as `control.WorkerState`."""
    return self.paceline.describe()  # type: ignore[no-any-return]


def paceline_check(self: Any, text: str | None) -> str | None:
    """Return the reason why this worker refuses a policy, None if it accepts it."""
    capped = self.paceline
    try:
        capped.check_policies(capped.parse(text))
    except ValueError as error:
        return str(error)
    return None


def paceline_set(self: Any, text: str | None) -> dict[str, Any]:
    """Put in force a policy that every worker accepts; return the state after it."""
    capped = self.paceline
    capped.set_policies(capped.parse(text), text)
    capped.log.info("paceline: policy %s", text)
    return paceline_describe(self)


def paceline_recorded(self: Any) -> dict[str, Any] | None:
    """Return the state of this worker's recording, None if it records nothing."""
    recording = self.paceline_recording
    return None if recording is None else recording.describe()


def paceline_stop_recording(self: Any) -> dict[str, Any] | None:
    """Finish this worker's trace, if it records one; an error is part of the answer."""
    recording = self.paceline_recording
    if recording is None:
        return None
    try:
        return recording.stop()  # type: ignore[no-any-return]
    except TraceError as error:
        return {**recording.describe(), "error": str(error)}


METHODS = (
    paceline_describe,
    paceline_check,
    paceline_set,
    paceline_recorded,
    paceline_stop_recording,
)
"""All of these."""
