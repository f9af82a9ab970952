"""Fakes and checks that ship, for the tests of this package and of engines that use it."""

from tiered_mmcache.testing.fakes import (
    ManualClock,
    ManualCopyEngine,
    ManualPageLocker,
    ManualThread,
    ManualTransfer,
    audit,
    audit_idle,
    poison_released,
)

__all__ = [
    "ManualClock",
    "ManualCopyEngine",
    "ManualPageLocker",
    "ManualThread",
    "ManualTransfer",
    "audit",
    "audit_idle",
    "poison_released",
]
