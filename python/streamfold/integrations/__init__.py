"""Shared code of the integrations :mod:`streamfold.slime` and :mod:`streamfold.vime`."""
