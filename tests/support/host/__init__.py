"""A stand-in for slime, the trainer: the part that an integration uses, with slime's names in slime's modules.

``host.slime`` is laid out like the real package, written for these tests, and never importable as ``slime`` but inside
:func:`installed`. vime, which is slime with another engine, is the same code under vime's names: what differs is in
``host.engine``. Arrays are numpy's where the real package holds torch tensors. Where slime takes the dotted path of a
function the stand-in also takes the function itself.
"""

from __future__ import annotations

from support.host.arguments import arguments
from support.host.install import installed

__all__ = ["arguments", "installed"]
