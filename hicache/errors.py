"""Operating errors of the runtime: what is wrong with numbers, where, what to do.

Programmer errors are assertions and anomalies found in logs are findings; neither is here.
"""

from __future__ import annotations


class HiCacheError(Exception):
    """Base of everything the runtime raises on purpose."""


class ConfigError(HiCacheError):
    """An option, or a combination of options, that cannot work."""


class WorkloadError(HiCacheError):
    """A workload file that can't be read or does not fit the run."""


class PoolError(HiCacheError):
    """Memory that the group has agreed on is not there on this rank."""


class AckError(HiCacheError):
    """A rank was told to apply more acks than it has transfers in flight."""


class StorageError(HiCacheError):
    """A call of the external tier that failed on this rank; it counts as a miss, or as not written."""


class MeetingError(HiCacheError):
    """The meeting guard has found ranks in one call that meant different things."""


class PromiseError(HiCacheError):
    """Pages that admission was promised are not there."""


class ForkError(HiCacheError):
    """The running digests of the ranks differ: their decisions have come apart."""
