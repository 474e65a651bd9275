"""Without Ray: what the error says, and what a Client says that is sent to another process."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys

import pytest

from streamfold import Client, Experts

WITHOUT = """
import sys
sys.modules["ray"] = None
try:
    import streamfold.ray
except ImportError as error:
    print(error)
"""


def test_without_ray_the_error_names_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout == "streamfold.ray needs ray: pip install 'streamfold[ray]'\n"


def test_a_client_cannot_be_pickled_or_copied_but_what_makes_one_can() -> None:
    client = Client("http://127.0.0.1:9")
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"pass on what makes it, as functools\.partial\(Client, "):
            send(client)
    make = functools.partial(Client, "http://127.0.0.1:9", experts=Experts(4, 2))
    again = pickle.loads(pickle.dumps(make))()
    assert (again.base_url, repr(again.experts)) == (client.base_url, repr(Experts(4, 2)))
