"""What the adapters for trainers (:mod:`streamfold.slime`, :mod:`streamfold.vime`) share."""
