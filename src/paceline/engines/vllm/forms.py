"""What goes over HTTP: the bodies of requests and answers, as /openapi.json describes them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Short = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, strict=True)]


class WantedPolicy(BaseModel):
    """What all workers shall follow."""

    model_config = ConfigDict(extra="forbid")

    policy: Short = Field(
        description='Short form of a policy; "start": what the server began with.',
        examples=["capacity_factor=1.25", "capacity_factor=1.5,pool=request", "start"],
    )


class LayerCounts(BaseModel):
    """What one layer of a worker did since counting began."""

    name: str
    assignments: int = Field(description="(token, expert) pairs that its router chose.")
    dropped: int = Field(description="Of these, those that a cap dropped.")
    device_peak_to_mean_before: float = Field(description="Busiest device over the mean.")
    device_peak_to_mean_after: float


class WorkerState(BaseModel):
    """What one worker has in force, and what it did; counts are over its layers."""

    rank: int
    layers: int
    devices: int
    expert_rank: int
    data_ranks: int
    off: bool = Field(description="Neither caps nor counts.")
    policy: str | None = Field(description="Short form; null where layers differ, or off.")
    fields: dict[str, Any] | None = Field(description="Of the policy.")
    policies: list[str | None] | None = Field(description="One a layer, where they differ.")
    min_expert_load: float | None = Field(description="Rows an expert below which none is capped.")
    forwards: int
    capped_forwards: int
    assignments: int
    dropped: int
    dropped_computed: int = Field(description="Dropped and computed all the same, with weight 0.")
    enforced: bool
    by_layer: list[LayerCounts]


class ServerState(BaseModel):
    """What is in force: the first worker's, and every worker's own."""

    policy: str | None
    fields: dict[str, Any] | None
    policies: list[str | None] | None
    off: bool
    enforced: bool
    min_expert_load: float | None
    agree: bool = Field(description="Whether all workers follow the same.")
    workers: list[WorkerState]


class Recording(BaseModel):
    """A trace that a worker records."""

    folder: str
    recording: bool = Field(description="Whether it goes on.")
    forwards: int = Field(description="That it holds.")


class Recordings(BaseModel):
    """All traces that are recorded."""

    traces: list[Recording]


class Refusal(BaseModel):
    """Why not: one sentence."""

    error: str
