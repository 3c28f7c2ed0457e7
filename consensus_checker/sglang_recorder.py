"""Where the records of one rank of a server go: a lane for the scheduler and one for each thread beside it.

Owns the files of one recording, as `consensus_recorder` has them: a ring in the folder that the environment
names, or in one of its own that is gone afterwards unless it holds evidence.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from consensus_checker.consensus_ranks import Agreed
from consensus_checker.consensus_recorder import (
    HEART_PART,
    Recording,
    limit_bytes_asked,
    tool_version,
    trace_asked,
)
from tracer.pack import Packer
from tracer.record import HEART_LANE, MAIN_LANE, Kind, Place, header
from tracer.sinks import Warn
from tracer.tracer import Tracer

# Of a ring's limit, the part of each lane that works for the scheduler.
LANE_PART = 16


class ServerRecording(Recording):
    """The lanes of one rank.

    Attributes:
        lanes: name -> tracer, the scheduler's first.
        config: of the header, for people and for `hits`.
    """

    def __init__(
        self,
        place: Place,
        agreed: Agreed,
        kinds: Sequence[Kind],
        lanes: Sequence[str],
        *,
        world_size: int,
        config: Mapping[str, Any],
        warn: Warn,
    ) -> None:
        # Not the parent's: its one lane has no steps, and its header no coordinates along tp, cp and pp.
        self._warn = warn
        self._place = place
        self._trace = trace_asked(warn)
        self._limit_bytes = limit_bytes_asked(warn)
        self._lane_count = len(lanes)
        self._is_own_folder = False
        self.folder = self._folder(agreed)
        self._packer = Packer() if self._trace == "ring" else None
        # What a rank has imported is no setting of it.
        alike = {name: value for name, value in config.items() if name != "points_lacking"}
        settings = json.dumps(alike, sort_keys=True, default=str).encode()
        top = header(
            place,
            kinds,
            lane=MAIN_LANE,
            run_id=agreed.run_id,
            tool_version=tool_version(),
            attempt=agreed.attempt,
            config=config,
            config_digest=blake2b(settings, digest_size=8).hexdigest(),
        )
        # Without sizes nobody can count them.
        self.header = {**top, "world_size": world_size, "digest": f"{agreed.algorithm} keyed"}
        self.lanes = {lane: self._tracer(lane) for lane in (MAIN_LANE, *lanes)}
        self.tracer = self.lanes[MAIN_LANE]
        self._heart = self._started_heart()
        self._armed = self._arm()

    @property
    def is_whole(self) -> bool:
        """Whether everything is kept from the first line on."""
        return self._trace == "full"

    def _tracer(self, lane: str) -> Tracer:
        return Tracer(
            self._sink(lane),
            {**self.header, "lane": lane},
            time.monotonic_ns,
            warn=self._warn,
            has_steps=lane == MAIN_LANE,
        )

    def _share(self, lane: str) -> int:
        """Of the ring's bytes, those of one lane."""
        heart, other = self._limit_bytes // HEART_PART, self._limit_bytes // LANE_PART
        if lane == HEART_LANE:
            return heart
        return other if lane != MAIN_LANE else self._limit_bytes - heart - self._lane_count * other
