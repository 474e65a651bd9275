"""The command line: ``streamfold demo | serve | rollout | record | replay``."""
