"""One request from its start to its :class:`~streamfold.Generation`: connect, stream, retry, abort."""
