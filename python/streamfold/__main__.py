"""``python -m streamfold`` is ``streamfold``."""

from streamfold.cli.main import app

app(prog_name="streamfold")
