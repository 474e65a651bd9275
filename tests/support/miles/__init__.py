"""A stand-in for miles, the trainer: the part that an integration uses, with miles's names in miles's modules.

Written for these tests, and importable as ``miles`` inside :func:`installed` alone. Samples of the two generations of
releases differ in how they keep weight versions and count speculative decoding: see :mod:`support.miles.types`.
"""

from __future__ import annotations

from support.miles.install import arguments, installed

__all__ = ["arguments", "installed"]
